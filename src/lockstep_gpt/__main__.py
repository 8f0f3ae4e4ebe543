"""The `lockstep-gpt` command, also `python -m lockstep_gpt`."""

from lockstep.commands import run

if __name__ == "__main__":
    run()
