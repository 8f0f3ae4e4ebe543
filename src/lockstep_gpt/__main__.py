"""`python -m lockstep_gpt`, the same as the `lockstep-gpt` command."""

from lockstep.commands import run

if __name__ == "__main__":
    run()
