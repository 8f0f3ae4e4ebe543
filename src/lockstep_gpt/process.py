"""`python -m lockstep_gpt.process agent|rank RUN_DIR`: the processes that the parent starts.

They start with the garbage collector off: torch and Lightning make so many lasting objects that
collecting among them takes a fifth of the time to import them.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from lockstep_gpt.config import PROGRAM
from lockstep_gpt.run_directory import RunDirectory

MODULES = {"agent": "lockstep_gpt.agent", "rank": "lockstep_gpt.training.train"}
LOST_PEERS = 75  # exit status of a rank under which others vanished (EX_TEMPFAIL of sysexits.h)


def command(role: str, run: RunDirectory) -> list[str]:
    """Return the command that starts an `agent` or a `rank` of `run`."""
    return [sys.executable, "-m", "lockstep_gpt.process", role, str(run.path)]


def invocation() -> str:
    """Return what to type here to reach this very installation's command."""
    if (found := shutil.which(PROGRAM)) and Path(found).parent == Path(sys.executable).parent:
        return PROGRAM
    if Path("scripts/dev.py").is_file():
        return "python3 scripts/dev.py"
    return f"{sys.executable} -m lockstep_gpt"


def main(role: str, path: str) -> int:
    """Be an agent or a rank of the run in the directory at `path`; return the exit status."""
    end_with_parent()
    gc.disable()
    module = importlib.import_module(MODULES[role])
    gc.enable()
    gc.freeze()
    status: int = module.main(RunDirectory(Path(path)))
    return status


def end_with_parent() -> None:
    """Kill this process as soon as its parent is gone, so that nothing outlives a killed run."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
