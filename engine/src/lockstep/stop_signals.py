"""Signals that stop a process: the first decides what follows, and repeats change nothing.

Except a second Ctrl-C, with which a person at the keyboard stops the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from lockstep.exits import after_signal
from lockstep.processes import STOP_SIGNALS, is_own_process

# Errors of what torch compiles, and of programs that it starts for this. By name: this module is
# also part of processes that don't import torch.
OF_COMPILERS = (
    "BackendCompilerFailed",
    "CalledProcessError",
    "CppCompileError",
    "SubprocException",
)
REPEAT_SECONDS = 0.3  # less is one Ctrl-C: `timeout -s INT` signals a process and its group
AT_ONCE = "\nstopping at once, without a save"


class Stopped(BaseException):
    """Training ended early. Not an `Exception`, so it isn't taken for a failure.

    Args:
        signum: the signal that stopped it.
        saved: whether all ranks have saved.
    """

    def __init__(self, signum: int, *, saved: bool = True) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.saved = saved


class Interrupted(KeyboardInterrupt):
    """A stop signal came while there was nothing to save."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"stopped by {signum.name}")
        self.signum = signum


class StopSignals:
    """The stop signals that this process gets; what the first one does changes as a run goes on.

    Args:
        has_keyboard: whether a second Ctrl-C stops this process at once. Processes without a
            keyboard get SIGINT from their parent, perhaps several times.
    """

    def __init__(self, *, has_keyboard: bool = False) -> None:
        self.first: signal.Signals | None = None
        self._has_keyboard = has_keyboard
        self._interrupted_at: float | None = None  # clock, of the first Ctrl-C
        self._react: Callable[[signal.Signals], None] | None = None
        self._stop_at_once: Callable[[], None] = self._end_process
        self.has_saved = False  # the state that this process was stopped with

    def interrupt(self) -> None:
        """From now on, raise `Interrupted` at the first signal: there is nothing to save."""
        self._stop_at_once = self._end_process
        self._call(_raise_interrupted)

    def pass_on(
        self, send: Callable[[signal.Signals], None], stop_at_once: Callable[[], None]
    ) -> None:
        """From now on, `send` the first signal to the processes that save the run.

        Args:
            send: is called once: at once if a signal has come already.
            stop_at_once: is called at a second Ctrl-C, instead of ending this process.
        """

        def react(signum: signal.Signals) -> None:
            send(signum)
            self._announce_save(signum)

        self._stop_at_once = stop_at_once
        self._call(react)

    def note(self) -> None:
        """From now on, only note the first signal: this process looks at `first`, and saves."""
        self._call(self._announce_save)

    def finish(self) -> None:
        """From now on, let signals change nothing: this process is about to end by itself."""
        self._react = None
        self._stop_at_once = _do_nothing

    def _call(self, react: Callable[[signal.Signals], None]) -> None:
        self._react = react
        if self.first is not None:
            react(self.first)

    def _announce_save(self, signum: signal.Signals) -> None:
        if self._has_keyboard and signum == signal.SIGINT:
            say("\nsaving after this step; press Ctrl-C again to stop at once")

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        """Handle a signal; Python calls it."""
        received = signal.Signals(signum)
        if received == signal.SIGINT and self._is_second_interrupt():
            self._stop_at_once()
        elif self.first is None:
            self.first = received
            if self._react is not None:
                self._react(received)

    def _is_second_interrupt(self) -> bool:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        return self._has_keyboard and now - self._interrupted_at > REPEAT_SECONDS

    def _end_process(self) -> None:
        if not self.has_saved:
            say(AT_ONCE)
        os._exit(after_signal(self.first or signal.SIGINT))


received = StopSignals()  # of this process


def ended_by_signal(error: BaseException | None) -> bool:
    """Return whether `error` is of a compiler that ended because of a stop signal.

    A signal to all processes of a job, or to a process group, also ends those that torch has
    started to compile a step.
    """
    while received.first is not None and error is not None:
        if any(kind.__name__ in OF_COMPILERS for kind in type(error).__mro__):
            return True
        error = error.__cause__
    return False


def install(*, has_keyboard: bool = False) -> StopSignals:
    """Handle the stop signals of this process from now on, as if none had come before."""
    global received
    received = StopSignals(has_keyboard=has_keyboard)
    for signum in handled_signals():
        signal.signal(signum, received.handle)
    return received


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals, without SIGHUP if the parent, such as `nohup`, has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if signum != signal.SIGHUP or not is_ignored]


def note() -> StopSignals:
    """Only note the first signal from now on; return what notes it."""
    if signal.getsignal(signal.SIGTERM) != received.handle:  # a rank of an agent, or no command
        install()
    received.note()
    return received


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Only note the first signal in this context; leave a foreign process its handlers afterward.

    A process of ours goes on to note it, and closes its trackers. Only the main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
    elif is_own_process() or signal.getsignal(signal.SIGTERM) == received.handle:
        note()
        yield
    else:
        with restored():
            note()
            yield


def say(line: str) -> None:
    """Print a line from a signal's handler, which may have interrupted another print."""
    with contextlib.suppress(OSError):  # its reader, such as `tee`, got the same Ctrl-C
        os.write(1, f"{line}\n".encode())


def end_at_once() -> None:
    """Let the kernel end this process at a stop signal, without a traceback and without Python.

    A library that waits for other processes would delay a handler written in Python.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what the other stop signals do anyway


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the handlers of signals afterward, for a caller that goes on."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # only it may have handlers
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _do_nothing() -> None:
    """Let this process end by itself."""


def _raise_interrupted(signum: signal.Signals) -> None:
    raise Interrupted(signum)
