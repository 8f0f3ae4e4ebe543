"""The commands, each with a line of help; a command's module is imported only when it runs."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from lockstep_gpt.config import PROGRAM, VERSION, ReportedError, RunError, UserError
from lockstep_gpt.exits import after_signal
from lockstep_gpt.processes import end_process
from lockstep_gpt.registry import merged, resolved


class Command(NamedTuple):
    """A function `(arguments) -> exit status` as `module:name`, and its purpose."""

    target: str
    meaning: str
    overrides: bool  # accepts Hydra overrides, which a shell can complete


COMMANDS = {
    "train": Command(".launch.commands:train", "train a GPT; by default the quickstart", True),
    "prepare": Command(".launch.commands:prepare", "tokenize a dataset", True),
    "evaluate": Command(".inference.evaluate:main", "measure the loss on held-out text", False),
    "generate": Command(".inference.generate:main", "continue a prompt", False),
    **{name: Command(*command) for name, command in merged("COMMANDS").items()},
}


def run() -> NoReturn:
    """Run `main`, then end the process with its exit status."""
    end_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for an invalid setting or command line."""
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    try:
        if name in COMMANDS:
            return int(resolved(COMMANDS[name].target)(words))
        if name == "--version":
            print(PROGRAM, VERSION)
            return 0
        shown = [each for each in COMMANDS if each[0] != "-"]  # shells call the others
        if name not in ("", "-h", "--help", "help"):
            print(f"{PROGRAM}: {name} is not one of {', '.join(shown)}", file=sys.stderr)
            return 2
        lines = [f"  {each:<10}{COMMANDS[each].meaning}" for each in shown]
        usage = [f"usage: {PROGRAM} COMMAND ...", "", *lines, "", "Also: COMMAND --help, --version"]
        print(*usage, sep="\n", file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    except (UserError, RunError) as error:
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return error.status
    except ReportedError as error:
        return error.status
    except KeyboardInterrupt:
        return after_signal(signal.SIGINT)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return after_signal(signal.SIGPIPE)  # which ends other programs
