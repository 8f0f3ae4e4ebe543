"""The processes of a command: its descendants, their command lines, and waiting for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 300.0  # seconds that anything may take


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                pids += map(int, task.read_text().split())
    return pids


def processes_in(folder: Path) -> list[int]:
    """Return the processes that work in a folder, also those whose parents have ended.

    Forks of a server can't be found by their environment: it is in the server's memory.
    """
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (entry / "cwd").readlink() == folder:
                pids.append(int(entry.name))
    return pids


def words_of(pid: int) -> str:
    """Return a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    """Wait until a condition is true; raise a `TimeoutError` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {seconds:g} s")
        time.sleep(0.02)
