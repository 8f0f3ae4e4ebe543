"""A rank as a program: `command` returns how to start it."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from lockstep_gpt import PROGRAM, processes, standard_streams, stop_signals
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.directory import RunDirectory


def command(run: RunDirectory) -> list[str]:
    """Return the command with which this process starts a rank of `run`."""
    return [sys.executable, "-m", __name__, str(run.path), str(os.getpid())]


def main(path: str, parent: str) -> NoReturn:
    """Run as a rank of the run in the directory `path`, then end the process."""
    processes.end_with_parent(int(parent))  # before the imports, which take seconds
    stop_signals.end_at_once()  # until there is something to save
    processes.import_all(["lockstep_gpt.training.train"])
    processes.end_process(run_rank(RunDirectory(Path(path))))


@standard_streams.never_failing()
def run_rank(run: RunDirectory) -> int:
    """Run as a rank of `run`, whose command is another process; return the exit status."""
    from lockstep_gpt.training import train

    try:
        with run.lock.of_rank(int(os.environ["RANK"])):
            return train.main(run)
    except UserError as error:  # an earlier rank 0 is still there
        print(f"{PROGRAM} train: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    main(*sys.argv[1:])
