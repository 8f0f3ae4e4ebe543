"""A tracker can't end a run: its calls have a time limit, and its first failure drops it.

Every logger from the configuration is guarded, also a user's own. Code that finds a logger in the
Trainer calls it as usual: it sees the logger's class, methods, and `experiment`.
"""

from __future__ import annotations

import inspect
import logging
import queue
import textwrap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger, Logger

from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory

logger = logging.getLogger(__name__)

REASON_LENGTH = 300  # characters; MLflow's errors have whole statements of SQL
ABANDON_SECONDS = 5.0  # for a tracker to clean up after its failure
SILENT = DummyLogger()  # takes any call, like its `experiment`


class TrackerGuard:
    """Calls one tracker in a thread of its own, and drops it when a call fails or hangs.

    Args:
        name: of the tracker, as in `logger=wandb`.
        seconds: that a call may take.
        directory: the run, whose `metrics.csv` has every row, whatever the tracker does.
    """

    def __init__(self, name: str, seconds: float, directory: RunDirectory) -> None:
        self.name = name
        self.seconds = seconds
        self.directory = directory
        self.dropped = False
        self._abandon: Callable[[RunDirectory], str] | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Not an executor: Python waits for its threads at the end, also for one that hangs.
        self._thread = threading.Thread(target=_work, args=[self._calls], name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, action: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`; None if it fails, or if the tracker is dropped.

        Args:
            action: the name of the call in a warning.
            function: is called in the tracker's thread.
            args: arguments; the first integer after the first one is the step.
            kwargs: others; so is `step`.
        """
        if self.dropped:
            return None
        if threading.current_thread() is self._thread:  # the tracker calls itself
            return function(*args, **kwargs)
        outcome: Future[Any] = Future()
        self._calls.put(partial(_run, outcome, partial(function, *args, **kwargs)))
        try:
            error = outcome.exception(self._limit(action, function))
        except TimeoutError:
            reason = f"no answer in {self.seconds:g} s"
            self._drop(action, reason, step_of(args, kwargs))
            return None
        if error is not None:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            reason = textwrap.shorten(reason, REASON_LENGTH, placeholder=" ...")
            logger.debug("%s failed", self.name, exc_info=error)
            self._drop(action, reason, step_of(args, kwargs))
            return None
        return outcome.result()

    def start(self, kind: Any, make: Callable[[], Logger]) -> Any:
        """Return the logger that `make` builds, guarded; one that does nothing if it can't start.

        Args:
            kind: its class, or a function that builds it. A static method `abandon` of a class
                cleans up after a failure, and returns how to get what was recorded, or "".
            make: builds it.

        Raises:
            UserError: a setting is wrong.
        """
        self._abandon = getattr(kind, "abandon", None)
        made = self.call("start", _made_or_refused, make)
        if isinstance(made, UserError):
            raise made
        if made is None:
            if not inspect.isclass(kind):
                kind = DummyLogger
            return Guarded(SILENT, self, kind)
        return Guarded(made, self, type(made))

    def _limit(self, action: str, function: Callable[..., Any]) -> float | None:
        """Return the seconds for a call; None: uploads of checkpoints at the end may take hours."""
        tracker = getattr(function, "__self__", None)
        if action == "close" and getattr(tracker, "uploads_checkpoints", False):
            return None
        return self.seconds

    def _drop(self, action: str, reason: str, step: int | None) -> None:
        """Warn once, and never call the tracker again."""
        self.dropped = True
        remedy = self._clean_up()
        place = ""
        if step is not None:
            place = f", from step {step} on"
        line = f"{self.name} no longer records this run{place} ({action}: {reason})"
        line += ", and may lack earlier rows"
        if action == "start":
            line = f"{self.name} does not record this run ({reason})"
            remedy = ""
        line += f"; {self.directory.metrics} has every row"
        if remedy:
            line += f"; {remedy}"
        logger.warning("%s", line)

    def _clean_up(self) -> str:
        """Call `abandon`, which may fail or hang like any other call of the tracker."""
        if self._abandon is None:
            return ""
        outcome: Future[str] = Future()
        work = partial(self._abandon, self.directory)
        threading.Thread(target=_run, args=[outcome, work], name=self.name, daemon=True).start()
        try:
            failed = outcome.exception(ABANDON_SECONDS) is not None
        except TimeoutError:
            failed = True
        if failed:
            return ""
        return outcome.result()


class Guarded:
    """Stands for a logger, or for its `experiment`; the guard makes the calls of its methods.

    Args:
        target: what it stands for.
        guard: of the tracker.
        kind: the class that it seems to be an instance of.
    """

    def __init__(self, target: Any, guard: TrackerGuard, kind: type) -> None:
        vars(self).update(guarded_target=target, guarded_by=guard, guarded_kind=kind)

    @property
    def __class__(self) -> type:  # `isinstance` finds a `WandbLogger` among the Trainer's loggers
        return vars(self)["guarded_kind"]  # type: ignore[no-any-return]

    @__class__.setter
    def __class__(self, kind: type) -> None:
        vars(self)["guarded_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        guard: TrackerGuard = vars(self)["guarded_by"]
        target = vars(self)["guarded_target"]
        if isinstance(getattr(type(target), name, None), property):
            value = guard.call(name, getattr, target, name)  # `experiment` may start the tracker
        else:
            value = getattr(target, name)
        if guard.dropped:
            return getattr(SILENT, name)
        if name == "experiment":
            return Guarded(value, guard, type(value))
        if inspect.isroutine(value):
            return partial(guard.call, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["guarded_target"], name, value)


def step_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the step of a call such as `log_metrics(row, 20)` or `log_table(..., step=20)`."""
    for value in (kwargs.get("step"), *args[1:]):
        if isinstance(value, int):
            return value
    return None


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Make the calls, one after the other, until there is no guard any more."""
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        del call  # what it refers to, also the guard, may go while this waits


def _run(outcome: Future[Any], function: Callable[[], Any]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:  # also SystemExit: a thread of ours must not end
        outcome.set_exception(error)


def _made_or_refused(make: Callable[[], Logger]) -> Logger | UserError:
    """Return what `make` builds, or the mistake in the settings that keeps it from that."""
    try:
        return make()
    except UserError as mistake:
        return mistake
