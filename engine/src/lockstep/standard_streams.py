"""Standard streams as a process may inherit them: closed, without a reader, with few characters."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


def open_missing() -> None:
    """Open standard streams that are closed, or the next files would be taken for them."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def show_every_character() -> None:
    """Replace characters that the terminal can't show, such as those of a sample, by codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # of a fork, whose file became a pipe
                stream.reconfigure(errors="backslashreplace")


class Lossy(io.FileIO):
    """A file for output that may be lost: its reader has gone, or its disk is full."""

    def write(self, content: object) -> int:
        """Write bytes; return their number even if they are lost."""
        size = memoryview(content).nbytes  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            return super().write(content) or size  # type: ignore[arg-type]
        return size


def lossy(stream: TextIO) -> TextIO:
    """Return a stream with the same file that never fails."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        "backslashreplace",
        line_buffering=True,
    )


@contextlib.contextmanager
def never_failing() -> Iterator[None]:
    """Let training go on when its output can't be written: `tee` ends with the same Ctrl-C."""
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    for name, stream in before.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no file, as in a notebook
            setattr(sys, name, lossy(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)
