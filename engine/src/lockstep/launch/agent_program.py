"""An agent as a program: `command` returns how to start it."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from lockstep import processes, project, stop_signals
from lockstep.exits import Exit
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory


def command(run: RunDirectory, node_rank: int, function: str) -> list[str]:
    """Return the command with which this process starts the agent of machine `node_rank`.

    Args:
        run: its configuration is frozen.
        node_rank: the number of the machine.
        function: what each rank calls; see `rank_program`.
    """
    words = [str(run.path), str(os.getpid()), str(node_rank), function]
    return [*project.python(), "-m", __name__, *words]


def main(path: str, parent: str, node_rank: str, function: str) -> NoReturn:
    """Run the agent of the run in the directory `path`, then end the process."""
    processes.end_with_parent(int(parent))  # before the imports, which take seconds
    stop_signals.end_at_once()
    run = RunDirectory(Path(path))
    try:
        processes.import_all(["lockstep.launch.agent"])
        from lockstep.launch import agent
    except Exception as error:  # of memory, for example
        last_line.show_error(run, error, int(node_rank))
        processes.end_process(Exit.REPORTED)
    processes.end_process(agent.main(run, int(node_rank), function))


if __name__ == "__main__":
    main(*sys.argv[1:])
