"""A process that trains runs of a comparison one after another."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

from lockstep import commands, processes, stop_signals
from lockstep.launch.script import begin


def main(parent: str, program: str) -> None:
    """Read requests, one line of JSON each, and answer each with the exit status of its run.

    Args:
        parent: the process that starts this one.
        program: a project's package, or a script.
    """
    processes.end_with_parent(int(parent))
    if program.endswith(".py"):
        begin(Path(program))
    else:
        importlib.import_module(program)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # between two runs
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # runs don't read requests
    for line in requests:
        request = json.loads(line)
        with Path(request["log"]).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        with stop_signals.restored(), processes.name_restored():
            status = commands.train(request["words"])
        sys.stdout.flush()
        answers.write(f"{status}\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
