"""Files that are complete and on disk under their name, or don't exist at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import UserError
from lockstep.file_systems import is_unsupported, lacks_folder_flush, remedy


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at the end; after an error, `path` is unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`, in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that a command's user has named: replaced whole, or left as it was.

    A link stays one, and a pipe or a device is written as it is.

    Raises:
        UserError: it can't be written.
    """
    if isinstance(content, str):
        content = content.encode()
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        with replacing(path.resolve()) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); {remedy(error)}") from None


def put_in_place(unfinished: Path, folder: Path) -> bool:
    """Give a complete folder its name; if it exists by now, remove ours, and return False.

    Raises:
        OSError: it cannot be renamed.
    """
    sync_folder(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # where there are no locks, another process may be as far
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        return False
    sync_folder(folder.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk: a power failure may undo a rename without this.

    Raises:
        OSError: the disk is broken, or full.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not lacks_folder_flush(error):
            raise


def sync(descriptor: int) -> None:
    """Flush a file or a folder to disk, where the file system can.

    Raises:
        OSError: the disk is broken, or full.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_unsupported(error):
            raise
