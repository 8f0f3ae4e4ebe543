"""How much memory a state in shared memory may take: what the system, or the container, has left.

Beyond it, the system would kill a process.
"""

import contextlib
import shutil
import sys
from pathlib import Path

from lockstep.memory.files import SharedMemoryError

MEMORY = Path("/proc/meminfo")  # in KiB; only on Linux
CONTAINER = Path("/sys/fs/cgroup")  # of a container, with limits in bytes


def bytes_left() -> int:
    """Return the bytes that this machine or container can still give; without limits, many."""
    left = sys.maxsize
    with contextlib.suppress(OSError, KeyError):
        left = 1024 * _numbers_in(MEMORY)["MemAvailable:"]
    with contextlib.suppress(OSError, KeyError, ValueError):  # no container, or no limit
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        parts = _numbers_in(CONTAINER / "memory.stat")
        cached = parts["file"] - parts["shmem"]  # of files on disk, which can be dropped
        left = min(left, limit - used + cached)
    return left


def refuse_little_room(folder: Path, needed: int) -> None:
    """Raise a `SharedMemoryError` if states take more than half of what shared memory has left.

    NCCL and loaders of data need some of it, too: 64 MB are common in a container.

    Args:
        folder: of the run's states; those that are there are overwritten.
        needed: bytes of all states on this machine.
    """
    present = sum(path.stat().st_size for path in folder.glob("*"))
    left = shutil.disk_usage(folder.parent).free + present
    if needed > left / 2:
        raise SharedMemoryError(
            f"states of {needed:,} bytes need more than half of the {left:,} left in "
            f"{folder.parent}; docker run --shm-size=8g enlarges it, memory=NUMBER_OF_STEPS "
            "takes all"
        )


def _numbers_in(path: Path) -> dict[str, int]:
    """Return name -> number of a file with one of both in each line."""
    lines = path.read_text().splitlines()
    return {line.split()[0]: int(line.split()[1]) for line in lines}
