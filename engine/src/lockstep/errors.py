"""What ends a command or a run in one line: a mistake, an event, or any exception."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.exits import Exit

MORE_FILES = "raise the limit of open files (ulimit -n)"
LARGER_FILES = "run: ulimit -f unlimited (or ask who has set the limit of the size of files)"
MORE_PROCESSES = "raise the limit of processes and threads (ulimit -u, or the container's pids)"
MORE_MEMORY = "use less memory, or raise its limit (ulimit -v, or the container's)"
# What an error says of which the system has set the limit.
REMEDIES_OF_LIMITS = {
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: MORE_FILES,
    errno.EFBIG: LARGER_FILES,
    errno.EAGAIN: MORE_PROCESSES,
    errno.ENOMEM: MORE_MEMORY,
}
TEXTS_OF_LIMITS = {
    "Too many open files": MORE_FILES,
    "can't start new thread": MORE_PROCESSES,
    "Resource temporarily unavailable": MORE_PROCESSES,
    "failed to map segment from shared object": MORE_MEMORY,
    "Cannot allocate memory": MORE_MEMORY,
}


class UserError(ValueError):
    """A mistake that the user can fix: one line, exit status 2, no traceback."""

    status = Exit.MISTAKE


class RunError(Exception):
    """An event, not a mistake, that ends a run, such as a full disk: one line, exit status 1."""

    status = Exit.FAILED


@contextmanager
def refusing_long_names() -> Iterator[None]:
    """Raise a `UserError` for a name that is too long for a file system, in any setting."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f"{error.strerror}: {error.filename}; give a shorter name") from error


class ReportedError(Exception):
    """Another process has reported why this one ends with `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"reported elsewhere; exit status {status}")
        self.status = status

    def __reduce__(self) -> tuple[type[ReportedError], tuple[int]]:
        """Return how to copy it into another process, as a launcher of Hydra does."""
        return ReportedError, (self.status,)


def describe_error(error: BaseException) -> str:
    """Return an exception in one line: the message of ours, else also the class and a remedy."""
    if isinstance(error, UserError | RunError):
        return str(error)
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    text = f"{name}: {lines[0]}" if lines else name
    remedy = remedy_of_limit(error)
    return f"{text}; {remedy}" if remedy else text


def remedy_of_limit(error: BaseException) -> str:
    """Return how to raise the limit of the system that caused `error`, or an empty string."""
    if isinstance(error, MemoryError):
        return MORE_MEMORY
    if isinstance(error, OSError) and error.errno in REMEDIES_OF_LIMITS:
        return REMEDIES_OF_LIMITS[error.errno]
    for text, remedy in TEXTS_OF_LIMITS.items():
        if text in str(error):
            return remedy
    return ""
