"""Waiting for other ranks, with a limit."""

import time
from collections.abc import Iterable

POLL_SECONDS = 0.005
HINT_SECONDS = 15.0  # without the other ranks, until the hint is printed


class MeetingError(Exception):
    """The ranks did not meet in time, or the process that serves their store is gone."""


class Waiting:
    """Waits for other ranks, but not forever."""

    def __init__(self, seconds: float, hint: str = "") -> None:
        self._seconds = seconds
        self._hint = hint
        self._started = time.monotonic()

    def restart(self) -> None:
        """Wait as long again, because the others are alive."""
        self._started = time.monotonic()

    def go_on(self, missing: Iterable[int]) -> None:
        """Wait a moment for the ranks `missing`; raise a `MeetingError` if the time is up."""
        names = ", ".join(map(str, missing))
        waited = time.monotonic() - self._started
        if waited > self._seconds:
            raise MeetingError(f"rank {names} did not come within {self._seconds:g} s")
        if self._hint and waited > HINT_SECONDS:
            print(f"waiting for rank {names}; {self._hint}", flush=True)
            self._hint = ""
        time.sleep(POLL_SECONDS)
