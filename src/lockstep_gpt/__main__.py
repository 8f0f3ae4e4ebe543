"""`python -m lockstep_gpt`, the same as the `lockstep-gpt` command."""

import sys

try:
    from lockstep_gpt.cli import run
except ModuleNotFoundError as error:
    if not error.name or error.name.startswith("lockstep_gpt"):
        raise
    where = "run .venv/bin/lockstep-gpt, or python3 scripts/dev.py, which makes .venv"
    print(f"{error.name} is not installed for {sys.executable}; {where}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    run()
