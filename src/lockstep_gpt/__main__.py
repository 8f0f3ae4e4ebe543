"""`python -m lockstep_gpt`, the same as the `lockstep-gpt` command."""

from lockstep_gpt.cli import run

if __name__ == "__main__":
    run()
