"""Which of our files compute a run, and which of them have changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from lockstep.run.directory import some_of

PACKAGE = Path(__file__).resolve().parents[1]
# Folders of the package, and its own files.
COMPUTING = ("model/", "training/", "data.py", "gpt.py", "modern.py", "module.py", "optim.py")


@cache
def file_hashes() -> dict[str, str]:
    """Return 8 hex digits for the content of each file that computes a step, by its path."""
    paths = [PACKAGE / name for name in COMPUTING]
    files = sorted(file for path in paths for file in [path, *path.rglob("*.py")] if file.is_file())
    return {
        file.relative_to(PACKAGE).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:8]
        for file in files
    }


def changes_since(
    before: Mapping[str, str] | None, places: Iterable[str] = COMPUTING
) -> str | None:
    """Name the files of a run in these places that are different now or gone.

    A new file can compute nothing for the run unless one of these files changes, too.

    Args:
        before: the run's `file_hashes()`; None if an earlier version has kept none.
        places: some of `COMPUTING`.

    Returns:
        up to three names, and how many others there are; None if no file differs.
    """
    if before is None:
        return None
    now = file_hashes()
    changed = [
        name
        for name in sorted(before)
        if name.startswith(tuple(places)) and before.get(name) != now.get(name)
    ]
    return some_of(changed) if changed else None
