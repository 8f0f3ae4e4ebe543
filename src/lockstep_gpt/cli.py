"""The commands, one line of help each; a command's module is imported when it runs."""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from lockstep_gpt.config import PROGRAM, RunError, UserError
from lockstep_gpt.processes import end_process
from lockstep_gpt.registry import merged, resolved


class Command(NamedTuple):
    """A function `(arguments) -> exit status` as `module:name`, and what it is for."""

    target: str
    meaning: str
    overrides: bool  # takes Hydra overrides, which a shell can complete


COMMANDS = {
    "train": Command(".launch.commands:train", "train a GPT; alone: the quickstart", True),
    "prepare": Command(".launch.commands:prepare", "make the token files of a data choice", True),
    "generate": Command(".inference.generate:main", "continue a prompt", False),
    "evaluate": Command(".inference.evaluate:main", "loss on all validation text", False),
    **{name: Command(*command) for name, command in merged("COMMANDS").items()},
}


def run() -> NoReturn:
    """Be the command: `main`, and then the end of the process."""
    end_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a wrong setting or command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            lines = [f"  {name:<10}{command.meaning}" for name, command in COMMANDS.items()]
            usage = [f"usage: {PROGRAM} COMMAND ...", "", *lines, "", "COMMAND --help says more."]
            print(*usage, sep="\n", file=sys.stdout if words else sys.stderr)
            return 0 if words else 2
        if words[0] in COMMANDS:
            return _run(words[0], words[1:])
        print(f"{PROGRAM}: {words[0]} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, of which others die


def _run(name: str, arguments: list[str]) -> int:
    try:
        return int(resolved(COMMANDS[name].target)(arguments))
    except (UserError, RunError) as error:
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
