"""How a process of a run starts, as an agent or a rank (`-m ...processes`), and how it ends."""

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
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # save, then exit
LOST_PEERS = 75  # exit status of a rank that lost other ranks (EX_TEMPFAIL of sysexits.h)


def command(role: str, run: RunDirectory, node_rank: int = 0) -> list[str]:
    """Return the command that starts an `agent` or a `rank` of `run` on this machine."""
    words = [sys.executable, "-m", "lockstep_gpt.processes", role, str(run.path)]
    return [*words, str(node_rank)] if node_rank else words


def invocation() -> str:
    """Return what to type in this folder to run this installation's command."""
    if (found := shutil.which(PROGRAM)) and Path(found).parent == Path(sys.executable).parent:
        return PROGRAM
    if Path("scripts/dev.py").is_file():
        return "python3 scripts/dev.py"
    return f"{sys.executable} -m lockstep_gpt"


def main(role: str, path: str, *node_rank: str) -> NoReturn:
    """Run an agent or a rank of the run in the directory `path`, then end the process."""
    end_with_parent()
    import_all([MODULES[role]])
    module = importlib.import_module(MODULES[role])
    end_process(module.main(RunDirectory(Path(path)), *map(int, node_rank)))


def import_all(modules: list[str]) -> None:
    """Import `modules` with the garbage collector off, and exclude their objects from it for good.

    torch and Lightning create so many lasting objects that scanning them takes a fifth of their
    import time, and later some of the time of each step.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()


def end_process(status: int) -> NoReturn:
    """End this process as the interpreter would, but without tearing down imported modules.

    Teardown takes a second and a half in each rank. gloo would also close its connections in
    order, which takes forever if another machine has vanished silently.
    """
    if status != LOST_PEERS:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as usual
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # missing, broken, or closed
            stream.flush()
    os._exit(status)


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process once its `parent` (a process id; default: the current parent) is gone."""
    expected = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
