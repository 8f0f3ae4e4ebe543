"""Exit statuses: what a process of a run tells the process that started it, in one place."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

SIGNALS = {signum.value: signum.name for signum in signal.Signals}
SIGNALED = 128  # a process that stopped by signal n, after saving, ends with 128 + n


class Exit(IntEnum):
    """The statuses that a command, an agent, or a rank chooses."""

    DONE = 0
    FAILED = 1  # an event or an error ended the run
    MISTAKE = 2  # the user can fix it: a wrong setting or command line
    REPORTED = 74  # an agent's: the run failed, and the last line is printed
    LOST_PEERS = 75  # a rank lost other ranks, for no fault of its own (EX_TEMPFAIL, sysexits.h)


def after_signal(signum: int) -> int:
    """Return the exit status of a process that a signal stopped: 128 + `signum`, as in shells."""
    return SIGNALED + signum


@dataclass(frozen=True)
class Ending:
    """How a process ended, from its exit status as `subprocess` reports it (-n: by signal n)."""

    code: int

    @property
    def killed_by(self) -> int:
        """The signal that killed it; 0 if none did."""
        return max(0, -self.code)

    @property
    def stopped_by(self) -> int:
        """The signal after which it saved and ended by itself; 0 if there was none."""
        signum = self.code - SIGNALED
        if signum not in SIGNALS:
            return 0
        return signum

    @property
    def lost_peers(self) -> bool:
        """Whether it ended because other ranks had."""
        return self.code == Exit.LOST_PEERS

    @property
    def is_deliberate(self) -> bool:
        """Whether it chose a status that the whole run should end with."""
        return self.code == Exit.MISTAKE or self.stopped_by > 0

    def __str__(self) -> str:
        """Return it as the end of a sentence about the process."""
        if self.lost_peers:
            return "lost its peers"
        if self.killed_by in SIGNALS:
            return f"was killed by {SIGNALS[self.killed_by]}"
        if self.stopped_by:
            return f"was stopped by {SIGNALS[self.stopped_by]}"
        return f"ended with status {self.code}"


def failed_endings(codes: Mapping[int, int | None]) -> dict[int, Ending]:
    """Return how ranks ended, by rank, if one of them failed; else nothing.

    Args:
        codes: exit statuses, by rank; None for ranks that go on.
    """
    if not any(codes.values()):
        return {}
    endings = {rank: Ending(code) for rank, code in codes.items() if code is not None}
    if any(ending.killed_by for ending in endings.values()):
        return {rank: ending for rank, ending in endings.items() if ending.code}
    return endings  # also those with status 0: they may have left the others alone


def describe_endings(ended: dict[int, Ending]) -> str:
    """Return how ranks ended, by rank; if some were killed, only those, else who left first."""
    killed = {rank: ending for rank, ending in ended.items() if ending.killed_by}
    first = {rank: ending for rank, ending in ended.items() if not ending.lost_peers}
    named = killed or first or ended
    return ", ".join(f"rank {rank} {ending}" for rank, ending in named.items())
