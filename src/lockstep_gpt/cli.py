"""The commands, each with a line of help; a command's module is imported only when it runs."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lockstep_gpt import PROGRAM, VERSION
from lockstep_gpt.catalog import extra_of_command, how_to_add
from lockstep_gpt.errors import ReportedError, RunError, UserError
from lockstep_gpt.exits import after_signal
from lockstep_gpt.processes import end_process
from lockstep_gpt.registry import COMMANDS as KIND
from lockstep_gpt.registry import Command, additions, resolved

COMMANDS = {
    "train": Command(".launch.commands:train", "train a GPT; by default the quickstart", True),
    "prepare": Command(".launch.commands:prepare", "tokenize a dataset", True),
    "evaluate": Command(".inference.evaluate:main", "measure the loss on held-out text", False),
    "generate": Command(".inference.generate:main", "continue a prompt", False),
    # Hydra's shell script, which `train -sc install=bash` prints, calls this one.
    "-sc": Command(".cli:complete", "complete words in the shell", False),
    **{name: command for table in additions(KIND) for name, command in table.items()},
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
            extra = extra_of_command(name)
            rule = f"needs {how_to_add(extra)}" if extra else f"is not one of {', '.join(shown)}"
            print(f"{PROGRAM}: {name} {rule}", file=sys.stderr)
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


def complete(arguments: list[str]) -> int:
    """Print the commands that a word in the shell may become; Hydra completes their overrides."""
    line = os.environ.get("COMP_LINE", "").split(" ")
    name = line[1] if len(line) > 1 else ""
    if len(line) < 3:
        print(" ".join(each for each in COMMANDS if each.startswith(name) and each[0] != "-"))
        return 0
    if name not in COMMANDS or not COMMANDS[name].overrides:
        return 0
    os.environ["COMP_LINE"] = " ".join([line[0], *line[2:]])
    return main([name, "-sc", *arguments])
