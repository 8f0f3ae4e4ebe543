"""Ctrl-Z pauses a run with all of its ranks, and `fg` continues it.

    terminal --SIGTSTP--> command --SIGTSTP--> agent --SIGSTOP--> ranks

Agent and ranks are in sessions of their own, which the terminal doesn't reach. The agent only waits
for its ranks, so it doesn't pause itself: other machines see that it is alive.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

DISARM_SECONDS = 0.5  # for ranks, to turn off timers that would run out while they are paused


@contextlib.contextmanager
def with_agent(agent: Any) -> Iterator[None]:
    """Let the ranks of `agent`, which is like a `Popen`, pause and continue with this process."""

    def pause(_signum: int, _frame: FrameType | None) -> None:
        agent.send_signal(signal.SIGTSTP)
        pause_this_process(pause)
        agent.send_signal(signal.SIGCONT)

    before = signal.signal(signal.SIGTSTP, pause)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def pause_this_process(handler: Callable[[int, FrameType | None], None]) -> None:
    """Do what SIGTSTP does to a process without `handler`; return when this process continues."""
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def pause_ranks(groups: Callable[[], Iterable[int]]) -> None:
    """Let an agent pause and continue its ranks, each of which leads one of `groups`."""

    def pause(_signum: int, _frame: FrameType | None) -> None:
        send(signal.SIGTSTP)
        time.sleep(DISARM_SECONDS)
        send(signal.SIGSTOP)

    def go_on(_signum: int, _frame: FrameType | None) -> None:
        send(signal.SIGCONT)

    def send(signum: signal.Signals) -> None:
        for group in groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signum)

    signal.signal(signal.SIGTSTP, pause)
    signal.signal(signal.SIGCONT, go_on)


class PauseNotice:
    """Tells a thread at once that a pause begins: the main thread may be busy in a library."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTSTP, self._pause)

    def _pause(self, _signum: int, _frame: FrameType | None) -> None:
        pause_this_process(self._pause)

    def comes_within(self, seconds: float) -> bool:
        """Wait for a notice or for any other signal; return whether a pause begins."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return bool(ready) and signal.SIGTSTP in os.read(self._read, 512)

    def stop(self) -> None:
        """Restore the handler, and end a wait."""
        signal.signal(signal.SIGTSTP, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._write, bytes(1))

    def close(self) -> None:
        """Close its files, once no thread waits."""
        os.close(self._read)
        os.close(self._write)
