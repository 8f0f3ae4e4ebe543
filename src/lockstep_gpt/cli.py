"""The commands, each with a line of help; a command's module is imported only when it runs."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lockstep_gpt import PROGRAM, VERSION
from lockstep_gpt.catalog import extra_of_command, how_to_add
from lockstep_gpt.errors import ReportedError, RunError, UserError, refusing_long_names
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    try:
        if name in COMMANDS:
            with refusing_long_names():
                return int(resolved(COMMANDS[name].target)(words[1:]))
        if name == "--version":
            print(PROGRAM, VERSION)
            return 0
        if name == "":
            print(_usage(), file=sys.stderr)
            return 2
        if name in ("-h", "--help", "help"):
            print(_usage())
            return 0
        print(f"{PROGRAM}: {name} {_unknown_command(name)}", file=sys.stderr)
        return 2
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


def _public_commands() -> list[str]:
    """Return the commands that people type; shells call those that begin with a dash."""
    return [name for name in COMMANDS if not name.startswith("-")]


def _usage() -> str:
    """Return the help of the program, with a line for each command."""
    lines = [f"  {name:<10}{COMMANDS[name].meaning}" for name in _public_commands()]
    usage = [f"usage: {PROGRAM} COMMAND ...", "", *lines, "", "Also: COMMAND --help, --version"]
    return "\n".join(usage)


def _unknown_command(name: str) -> str:
    """Return why a command is not available, as the end of a sentence about it."""
    extra = extra_of_command(name)
    if extra is not None:
        return f"needs {how_to_add(extra)}"
    return f"is not one of {', '.join(_public_commands())}"


def complete(arguments: list[str]) -> int:
    """Print the commands that a word in the shell may become; Hydra completes their overrides."""
    line = os.environ.get("COMP_LINE", "").split(" ")
    if len(line) < 3:  # the command itself is not complete
        prefix = line[-1] if len(line) == 2 else ""
        print(" ".join(name for name in _public_commands() if name.startswith(prefix)))
        return 0
    program, name, *overrides = line
    if name not in COMMANDS or not COMMANDS[name].overrides:
        return 0
    os.environ["COMP_LINE"] = " ".join([program, *overrides])
    return main([name, "-sc", *arguments])
