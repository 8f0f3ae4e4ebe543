"""The `lockstep` command, also `python -m lockstep`: the engine's commands for any program.

    lockstep check train.py --ranks 1,2,4

The word after the command names a script whose function `lockstep.main` decorates; `check` takes
any Lightning script. A project with a package has the same commands under its own name.
"""

import sys
from pathlib import Path
from typing import NoReturn

from lockstep import commands, configs, project
from lockstep.errors import UserError
from lockstep.exits import Exit
from lockstep.launch.script import begin, is_program
from lockstep.project import Project
from lockstep.versions import VERSION

# Settings of these machines, which are in no program: `doctor` needs no other ones.
MACHINES = Project(
    program="lockstep",
    package=None,
    version=VERSION,
    configs=Path(configs.__file__).parent,
    train="",
    config_name="machines",
)


def run() -> NoReturn:
    """Run one command for the program that its first word names, and end with its status."""
    words = sys.argv[1:]
    project.begin(MACHINES)
    if len(words) > 1 and words[1].endswith(".py"):
        script = Path(words[1])
        try:
            if words[0] != "check" or is_program(script):
                begin(script)
                del words[1]
        except UserError as error:
            print(f"lockstep {words[0]}: {error}", file=sys.stderr)
            sys.exit(Exit.MISTAKE)
    commands.run(words)


if __name__ == "__main__":
    run()
