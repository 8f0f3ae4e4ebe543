"""Files that are whole and on the disk under their name, or not there at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` in the end; after an error nothing changes."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write `text`, in UTF-8, in the place of what `path` holds."""
    with replacing(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """See the names in a folder to the disk: a rename alone may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
