"""Whether a checkpoint can be as large as it must be: on its disk, and under the user's limits."""

import resource
from pathlib import Path
from typing import Any

from lockstep.errors import LARGER_FILES, RunError
from lockstep.file_systems import bytes_left


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise a `RunError` if `folder` has fewer than `needed` bytes free."""
    free = bytes_left(folder)
    if free is not None and free < needed:
        raise RunError(
            f"{folder} has {free:,} bytes left, but a checkpoint needs {needed:,}; "
            "free some space there"
        )


def refuse_large_file(needed: int) -> None:
    """Raise a `RunError` if this process may not write a file of `needed` bytes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise RunError(
            f"a file may have at most {limit:,} bytes (ulimit -f), but a checkpoint needs "
            f"{needed:,}; {LARGER_FILES}"
        )


def size_of(content: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(content, dict):
        return sum(map(size_of, content.values()))
    if isinstance(content, list | tuple):
        return sum(map(size_of, content))
    return int(getattr(content, "nbytes", 0))
