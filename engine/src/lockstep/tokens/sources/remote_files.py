"""Files of a server: what to install for its protocol, and reading on after a lost connection."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

from lockstep.errors import UserError
from lockstep.optional import library_command

logger = logging.getLogger(__name__)

TRIES = 5  # in a row, before an error of the server ends the reading
WAIT = 0.5  # seconds before the second try; they double with each
BUFFER = 1 << 20  # bytes
# Another try would give the same.
FINAL = (FileNotFoundError, PermissionError, NotImplementedError)


def find_file_system(url: str, setting: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL or a path, and the place in it.

    Raises:
        UserError: the library for this protocol is missing.
        Exception: any other error of a file system.
    """
    import fsspec  # a large part of the import time, and not always needed

    try:
        system, place = fsspec.url_to_fs(url)  # expands ~ too
    except ImportError as error:
        cause = error.__cause__ or error
        library = (getattr(cause, "name", None) or str(error)).partition(".")[0]
        raise UserError(
            f"{setting}={url} needs {library}, which is not installed; run: "
            f"{library_command(library)}"
        ) from error
    return system, place


def open_remote(system: Any, path: str) -> io.BufferedReader:
    """Open a file of a server for reading; `read` returns fewer bytes only at its end."""
    return io.BufferedReader(RemoteFile(system, path), BUFFER)


class RemoteFile(io.RawIOBase):
    """Opens a file again, where it was, after an error or an early end.

    A server that doesn't send parts of files sends the file from its start again.

    Args:
        system: the file system of fsspec.
        path: the file in it.
    """

    def __init__(self, system: Any, path: str) -> None:
        self.system = system
        self.path = path
        self.sends_parts = True
        self.failures = 0  # in a row; of a server that doesn't send parts, in all
        self.offset = 0
        self.raw: Any = None
        self.size: int | None = system.info(path).get("size")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self.offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set and return the offset of the next byte; a read goes there.

        Raises:
            OSError: it is counted from the end, which the server doesn't tell.
        """
        start = 0
        if whence == io.SEEK_CUR:
            start = self.offset
        if whence == io.SEEK_END:
            if self.size is None:
                raise OSError("the server does not tell its size")
            start = self.size
        if start + offset != self.offset:
            self.offset = start + offset
            self._close_raw()
        return self.offset

    def readinto(self, buffer: Any) -> int:
        """Read bytes into `buffer`, and return how many; 0 at the end.

        Raises:
            Exception: any error of the file system, several times in a row.
        """
        view = memoryview(buffer)
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        self._close_raw()
        super().close()

    def _read(self, size: int) -> bytes:
        while self.size is None or self.offset < self.size:
            try:
                if self.raw is None:
                    self._open()
                data: bytes = self.raw.read(size)
                if not data and self.size is not None:
                    raise EOFError(f"it ended at byte {self.offset:,} of {self.size:,}")
            except Exception as error:  # of any library
                self._close_raw()
                self._note_failure(error)
            else:
                self.offset += len(data)
                if self.sends_parts:
                    self.failures = 0
                return data
        return b""

    def _open(self) -> None:
        """Open the file, and go to the offset."""
        if self.sends_parts:
            self.raw = self.system.open(self.path, "rb")
            self.raw.seek(self.offset)
            return
        self.raw = self.system.open(self.path, "rb", block_size=0)  # a stream
        skipped = 0
        while skipped < self.offset:
            data = self.raw.read(min(BUFFER, self.offset - skipped))
            if not data:
                raise EOFError(f"it ended at byte {skipped:,}")
            skipped += len(data)

    def _note_failure(self, error: Exception) -> None:
        """Wait before another try; raise the error if that is of no use."""
        if isinstance(error, ValueError) and self.sends_parts:  # what fsspec's HTTP raises
            self.sends_parts = False
            return
        self.failures += 1
        if self.failures == TRIES or isinstance(error, FINAL):
            raise error
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("%s: %s; trying again at byte %s", self.path, reason, f"{self.offset:,}")
        time.sleep(WAIT * 2 ** (self.failures - 1))

    def _close_raw(self) -> None:
        if self.raw is not None:
            self.raw.close()
            self.raw = None
