"""How a process of a run begins, as an agent or a rank (`-m ...processes`), and how it ends."""

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from lockstep_gpt.config import PROGRAM
from lockstep_gpt.run_directory import RunDirectory

MODULES = {"agent": f"{__package__}.launch.agent", "rank": f"{__package__}.training.train"}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # save, and end
LOST_PEERS = 75  # exit status of a rank under which others vanished (EX_TEMPFAIL of sysexits.h)


def command(role: str, run: RunDirectory, node_rank: int = 0) -> list[str]:
    """Return the command that starts an `agent` or a `rank` of `run` on this machine."""
    words = [sys.executable, "-m", "lockstep_gpt.processes", role, str(run.path)]
    return [*words, str(node_rank)] if node_rank else words


def invocation() -> str:
    """Return what to type here to reach this very installation's command."""
    if (found := shutil.which(PROGRAM)) and Path(found).parent == Path(sys.executable).parent:
        return PROGRAM
    if Path("scripts/dev.py").is_file():
        return "python3 scripts/dev.py"
    return f"{sys.executable} -m lockstep_gpt"


def main(role: str, path: str, *node_rank: str) -> NoReturn:
    """Be an agent or a rank of the run in the directory at `path`, to the end of the process."""
    end_with_parent()
    import_all([MODULES[role]])
    module = importlib.import_module(MODULES[role])
    end_process(module.main(RunDirectory(Path(path)), *map(int, node_rank)))


def import_all(modules: list[str]) -> None:
    """Import `modules` with the garbage collector off, and have it pass over them for good.

    torch and Lightning make so many lasting objects that collecting among them takes a fifth of
    the time of their import, and later some of the time of each step.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()


def end_process(status: int) -> NoReturn:
    """End this process as the interpreter would, but without taking apart what it has imported.

    That takes a second and a half, of each rank; and gloo would close its connections in order,
    which takes for ever where another machine is gone without a word.
    """
    if status != LOST_PEERS:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as always
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, broken or closed
            stream.flush()
    os._exit(status)


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process as soon as its `parent` (its id; by default that of now) is gone."""
    expected = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
