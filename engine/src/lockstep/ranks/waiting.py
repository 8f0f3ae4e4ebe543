"""Waiting for other processes, with a limit, and a line for the person who waits, too."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.005
HINT_SECONDS = 10.0  # without the others, until a line says so


class MeetingError(Exception):
    """The ranks did not meet in time, or the process that serves their store is gone."""


class Waiting:
    """Waits for other ranks, but not forever.

    Args:
        seconds: the longest wait.
        hint: where they should come, and what to check; is printed once if they are late.
    """

    def __init__(self, seconds: float, hint: str = "") -> None:
        self._seconds = seconds
        self._hint = hint
        self._started = time.monotonic()

    def go_on(self, awaited: str, fault: str = "") -> None:
        """Wait a moment for what is `awaited`; raise a `MeetingError` if the time is up.

        Args:
            awaited: such as `rank 1, 3`.
            fault: why it could not be reached just now, if the system says so.
        """
        waited = time.monotonic() - self._started
        reason = f": {fault}" if fault else ""
        if waited > self._seconds:
            raise MeetingError(f"{awaited} did not come within {self._seconds:g} s{reason}")
        if self._hint and waited > HINT_SECONDS:
            print_hint(f"waiting for {awaited}, at most {self._seconds:g} s{reason}; {self._hint}")
            self._hint = ""
        time.sleep(POLL_SECONDS)


def print_hint(line: str) -> None:
    """Print why nothing happens."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def hinting(line: str) -> Iterator[None]:
    """Print `line` if a call of a library waits for other processes for long."""
    timer = threading.Timer(HINT_SECONDS, print_hint, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
