"""What ends a command or a run in one line: a mistake, or an event."""

from lockstep_gpt.exits import Exit


class UserError(ValueError):
    """A mistake that the user can fix: one line, exit status 2, no traceback."""

    status = Exit.MISTAKE


class RunError(Exception):
    """An event, not a mistake, that ends a run, such as a full disk: one line, exit status 1."""

    status = Exit.FAILED


class ReportedError(Exception):
    """Another process has reported why this one ends with `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"reported elsewhere; exit status {status}")
        self.status = status
