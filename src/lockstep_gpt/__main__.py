"""`python -m lockstep_gpt`, the same as the `lockstep-gpt` command."""

import sys

from lockstep_gpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
