"""Which of our files compute a run, and which of them have changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from lockstep_gpt.run.directory import some_of

PACKAGE = Path(__file__).resolve().parents[1]
COMPUTING = ("model", "training")  # folders of the package


@cache
def file_hashes() -> dict[str, str]:
    """Return 8 hex digits for the content of each file that computes a step, by its path."""
    files = sorted(file for folder in COMPUTING for file in (PACKAGE / folder).rglob("*.py"))
    return {
        file.relative_to(PACKAGE).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:8]
        for file in files
    }


def changes_since(
    before: Mapping[str, str] | None, folders: Iterable[str] = COMPUTING
) -> str | None:
    """Name the files of a run in these folders that are different now or gone.

    A new file can compute nothing for the run unless one of these files changes, too.

    Args:
        before: the run's `file_hashes()`; None if an earlier version has kept none.
        folders: some of `COMPUTING`.

    Returns:
        up to three names, and how many others there are; None if no file differs.
    """
    if before is None:
        return None
    now = file_hashes()
    changed = [
        name
        for name in sorted(before)
        if name.startswith(tuple(f"{folder}/" for folder in folders))
        and before.get(name) != now.get(name)
    ]
    return some_of(changed) if changed else None
