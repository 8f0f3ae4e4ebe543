"""A rank as a program: `command` returns how to start it."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from lockstep_gpt import processes, standard_streams, stop_signals
from lockstep_gpt.run import last_line
from lockstep_gpt.run.directory import RunDirectory


def command(run: RunDirectory) -> list[str]:
    """Return the command with which this process starts a rank of `run`."""
    return [sys.executable, "-m", __name__, str(run.path), str(os.getpid())]


def main(path: str, parent: str) -> NoReturn:
    """Run as a rank of the run in the directory `path`, then end the process."""
    processes.own_process()
    processes.end_with_parent(int(parent))  # before the imports, which take seconds
    stop_signals.end_at_once()  # until there is something to save
    processes.end_process(run_rank(RunDirectory(Path(path))))


@standard_streams.never_failing()
def run_rank(run: RunDirectory) -> int:
    """Run as a rank of `run`, whose command is another process; return the exit status."""
    rank = int(os.environ["RANK"])
    with last_line.left_to_agent():
        try:
            processes.import_all(["lockstep_gpt.training.train"])
            from lockstep_gpt.training import train

            with run.lock.of_rank(rank):
                return train.main(run)
        except Exception as error:
            return last_line.fail_early(run, rank, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
