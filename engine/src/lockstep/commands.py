"""The commands, each with a line of help; a command's module is imported only when it runs."""

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from lockstep import project, standard_streams, stop_signals, variables
from lockstep.errors import (
    ReportedError,
    RunError,
    UserError,
    describe_error,
    refusing_long_names,
)
from lockstep.exits import after_signal
from lockstep.processes import (
    end_process,
    escaped,
    name_restored,
    own_process,
    print_error,
)
from lockstep.project import Command
from lockstep.stop_signals import Interrupted
from lockstep.versions import VERSION

# Of the engine; a project adds its own.
OURS = {
    "train": Command("lockstep.commands:train", "train; by default the quickstart", True),
    "prepare": Command("lockstep.tokens.command:main", "tokenize a dataset", True),
    "evaluate": Command("lockstep.evaluation.command:main", "measure on held-out data", False),
    "check": Command("lockstep.testing.command:main", "compare runs on 1, 2, 4 ranks", True),
    "plan": Command("lockstep.plan.command:main", "predict memory, time, cost", True),
    "doctor": Command("lockstep.cluster.doctor:main", "check these machines", True),
    "drill": Command("lockstep.testing.drill:main", "break small runs on purpose", True),
    "compare": Command("lockstep.evidence.compare:main", "train in pairs, judge", False),
    "verify": Command("lockstep.evidence.verify:main", "compute steps again", False),
    "panel": Command("lockstep.pages.panel:main", "show a run's all-reduces", False),
    "report": Command("lockstep.pages.run_report:main", "report runs", False),
    # Hydra's shell script, which `train -sc install=bash` prints, calls this one.
    "-sc": Command("lockstep.commands:complete", "complete words in the shell", False),
}
FOLDER = Path(__file__).parent
OF_PACKAGES = ("train", "prepare", "evaluate", "-sc")


def table() -> dict[str, Command]:
    """Return all commands of the current project: of each run, its own, then the engine's others.

    A command of the project's stands in the place of the engine's of that name. A script trains
    when Python runs it.
    """
    ours = {name: command for name, command in OURS.items() if _is_there(command)}
    if project.package() is None:
        return {name: ours[name] for name in ours if name not in OF_PACKAGES}
    usual: dict[str, Command] = {
        name: ours[name] for name in ("train", "prepare", "evaluate") if name in ours
    }
    commands = {**usual, **project.current().commands}
    return {**commands, **{name: ours[name] for name in ours if name not in commands}}


def _is_there(command: Command) -> bool:
    """Return whether the file of a command of ours is there: an optional folder may be deleted."""
    _, *parts = command.target.partition(":")[0].split(".")
    return FOLDER.joinpath(*parts).with_suffix(".py").is_file()


def run(words: Sequence[str] | None = None) -> NoReturn:
    """Run one command, by default that of the command line, and end with its exit status.

    The command's handlers of signals stay until the end: a late signal changes nothing.
    """
    own_process()
    standard_streams.open_missing()
    standard_streams.show_every_character()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, every child seems to succeed
    end_process(_run_command([*(sys.argv[1:] if words is None else words)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command in this process, which goes on, and return the command's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with stop_signals.restored(), name_restored():
        return _run_command(words)


def _run_command(words: list[str]) -> int:
    """Return the exit status of one command: 2 for an invalid setting or command line."""
    name = words[0] if words else ""
    program, commands = project.current().program, table()
    try:
        if name in commands:
            with refusing_long_names():
                variables.settle()
                return int(resolve_name(commands[name].target)(words[1:]))
        return _run_without_command(name)
    except (UserError, RunError) as error:
        print_error(f"{program} {name}: {error}")
        return error.status
    except ReportedError as error:
        return error.status
    except Interrupted as stop:
        print(f"{program} {name}: {stop} before its end; start it again", file=sys.stderr)
        return after_signal(stop.signum)
    except KeyboardInterrupt:
        return _report_interrupt(name)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return after_signal(signal.SIGPIPE)  # which ends other programs
    except Exception as error:  # a bug, or a limit of the system
        traceback.print_exc()
        print(f"{program} {name}: {describe_error(error)}", file=sys.stderr)
        return 1


def _run_without_command(word: str) -> int:
    """Return the exit status of a first word that is no command."""
    ours = project.current()
    if word == "--version":
        named = "" if ours.package is None else f"{ours.program} {ours.version}, "
        print(f"{named}lockstep {VERSION}")
        return 0
    if word == "":
        print(_usage(), file=sys.stderr)
        return 2
    if word in ("-h", "--help", "help"):
        print(_usage())
        return 0
    print(escaped(f"{ours.program}: {word} {_unknown_command(word)}"), file=sys.stderr)
    return 2


def _report_interrupt(name: str) -> int:
    """Print that a Ctrl-C ended a command; return its exit status."""
    if table()[name].overrides:  # not `generate`: its text is on the screen
        print(f"{project.program()} {name}: stopped by SIGINT; start it again", file=sys.stderr)
    return after_signal(signal.SIGINT)


def train(words: list[str]) -> int:
    """Train, as the project's training function says."""
    from lockstep.launch.main import training

    sys.argv[0] = project.program()  # the name by which Hydra's script for the shell calls it
    return training().run(words)


def _public_commands() -> list[str]:
    """Return the commands that people type; shells call those that begin with a dash."""
    return [name for name in table() if not name.startswith("-")]


def _usage() -> str:
    """Return the help of the program, with a line for each command."""
    commands = table()
    lines = [f"  {name:<10}{commands[name].meaning}" for name in _public_commands()]
    usage = [
        f"usage: {project.program()} COMMAND ...",
        "",
        *lines,
        "",
        "Also: COMMAND --help, --version",
    ]
    return "\n".join(usage)


def _unknown_command(name: str) -> str:
    """Return why a command is not available, as the end of a sentence about it."""
    near = difflib.get_close_matches(name, _public_commands(), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"is not one of {', '.join(_public_commands())}{hint}"


def complete(arguments: list[str]) -> int:
    """Print the commands that a word in the shell may become; Hydra completes their overrides."""
    line = os.environ.get("COMP_LINE", "").split(" ")
    if len(line) < 3:  # the command itself is not complete
        prefix = line[-1] if len(line) == 2 else ""
        print(" ".join(name for name in _public_commands() if name.startswith(prefix)))
        return 0
    program, name, *overrides = line
    commands = table()
    if name not in commands or not commands[name].overrides:
        return 0
    os.environ["COMP_LINE"] = " ".join([program, *overrides])
    return main([name, "-sc", *arguments])
