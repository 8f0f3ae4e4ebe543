"""What ends a command or a run in one line: a mistake, or an event."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep_gpt.exits import Exit


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
