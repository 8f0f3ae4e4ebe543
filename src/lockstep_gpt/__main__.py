"""`python -m lockstep_gpt`, the same as the `lockstep-gpt` command."""

import importlib.util
import sys

from lockstep_gpt.cli import run

LIBRARY = "omegaconf"  # a Python without it has none of our libraries


def refuse_bare_python() -> None:
    """Exit with status 2 if this Python lacks the project's libraries."""
    if importlib.util.find_spec(LIBRARY) is None:
        command = ".venv/bin/lockstep-gpt"
        remedy = f"run {command}, or python3 scripts/dev.py, which makes .venv"
        print(f"{LIBRARY} is not installed for {sys.executable}; {remedy}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    refuse_bare_python()
    run()
