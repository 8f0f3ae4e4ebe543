"""A rank as a program: `command` returns how to start it.

What a rank calls is given as text: `package.module:name`, or `/path/of/script.py:name` for what a
script defines. It is called with the run directory, and returns the rank's exit status.
"""

import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, cast

from lockstep import processes, project, standard_streams, stop_signals
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory

MAIN = "__mp_main__"  # the name of a script in a process that only imports it, as Python's own


def command(run: RunDirectory, function: str) -> list[str]:
    """Return the command with which this process starts a rank of `run`."""
    return [*project.python(), "-m", __name__, str(run.path), str(os.getpid()), function]


def main(path: str, parent: str, function: str) -> NoReturn:
    """Run as a rank of the run in the directory `path`, then end the process."""
    processes.own_process()
    processes.end_with_parent(int(parent))  # before the imports, which take seconds
    stop_signals.end_at_once()  # until there is something to save
    processes.end_process(run_rank(RunDirectory(Path(path)), function))


@standard_streams.never_failing()
def run_rank(run: RunDirectory, function: str) -> int:
    """Run as a rank of `run`, whose command is another process; return the exit status."""
    rank = int(os.environ["RANK"])
    with last_line.left_to_agent():
        try:
            place = function.rpartition(":")[0]
            if not place.endswith(".py"):
                processes.import_all([place])
            call = imported(function)
            with run.lock.of_rank(rank):
                return call(run)
        except Exception as error:
            return last_line.fail_early(run, rank, error)


def imported(function: str) -> Callable[..., int]:
    """Import what a rank calls."""
    place, _, name = function.rpartition(":")
    if place.endswith(".py"):
        target: Any = _script(Path(place))
        for part in name.split("."):
            target = getattr(target, part)
    else:
        target = resolve_name(function)
    return cast(Callable[..., int], getattr(target, "rank", target))  # of a `Program`


def _script(path: Path) -> types.ModuleType:
    """Import a script as Python's own `multiprocessing` does in a new process.

    Worker processes of this one then find what it defines, and `__name__` isn't `__main__`.
    """
    sys.path.insert(0, str(path.parent))  # as for a script that is run
    module = types.ModuleType(MAIN)
    vars(module).update(runpy.run_path(str(path), run_name=MAIN))
    sys.modules["__main__"] = sys.modules[MAIN] = module
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
