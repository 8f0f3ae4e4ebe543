"""What a failed rank leaves: the stack in its log, `failed.json`, and an exit status.

It is told before anyone else handles the exception: a callback or a logger may wait for ranks that
haven't failed, as Lightning's OnExceptionCheckpoint does.
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from lightning import Callback
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.errors import RunError, UserError, describe_error, remedy_of_limit
from lockstep.exits import Exit
from lockstep.processes import program_name
from lockstep.ranks.ranks import Ranks, lost_peers
from lockstep.run import last_line, remedies
from lockstep.run.directory import RunDirectory

HANDLING_SECONDS = 5.0  # that handlers of an exception have, unless all ranks have failed
POLL_SECONDS = 0.1


class ReportFirst(Callback):
    """Reports an exception; stands before all other callbacks.

    Args:
        report: is called with the exception while it is handled.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self.report = report

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report it."""
        self.report(exception)


class HandlingLimit:
    """Ends this rank if handlers of its exception wait for ranks that have not failed.

    Where all ranks have failed, their handlers can still meet, and save.

    Args:
        ranks: this process among all.
        store: where the ranks have met.
        is_busy: whether this rank still writes a checkpoint; it may finish.
        end: ends this process.
    """

    def __init__(
        self, ranks: Ranks, store: Store, is_busy: Callable[[], bool], end: Callable[[], Any]
    ) -> None:
        self._all_failed = threading.Event()
        self._is_over = threading.Event()
        self._ranks = ranks
        self._store = store
        self._is_busy = is_busy
        self._end = end
        for target in (self._meet, self._limit):  # the store may not answer
            threading.Thread(target=target, daemon=True).start()

    def lift(self) -> None:
        """The handlers have returned."""
        self._is_over.set()

    def _meet(self) -> None:
        """Tell the other ranks that this one has failed, and ask whether all have."""
        keys = [f"rank {rank} has failed" for rank in range(self._ranks.world_size)]
        with contextlib.suppress(RuntimeError):  # torch's error, if the process that serves it ends
            self._store.set(keys[self._ranks.rank], "")
            while not self._is_over.wait(POLL_SECONDS):
                if self._store.check(keys):
                    self._all_failed.set()
                    return

    def _limit(self) -> None:
        limit = time.monotonic() + HANDLING_SECONDS
        while time.monotonic() < limit or self._is_busy():
            if self._is_over.wait(POLL_SECONDS) or self._all_failed.is_set():
                return
        self._end()


def report_failure(
    directory: RunDirectory,
    ranks: Ranks,
    error: BaseException,
    terminal: TextIO,
) -> int:
    """Record the failure of this rank while its exception is handled; return the exit status.

    All ranks write the stack to their logs, with an explanation if the error is a known one. The
    first one shows it on the terminal, too. Mistakes and events need no stack, but a line, which
    `last_line` shows at the end.
    """
    if isinstance(error, UserError):
        line = f"{program_name()}: {error}"
        return _record(directory, ranks, Exit.MISTAKE, error, line, "", terminal)
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # Lightning has replaced it
    stack = traceback.format_exc()
    cause = remedies.explain(stack)
    text = f"{cause}\n\n{stack}" if cause else stack
    last_line.append(directory.log_of(ranks.rank), text)
    if lost_peers(error) and not remedy_of_limit(error):
        return Exit.LOST_PEERS
    what = describe_error(error)
    if cause and not isinstance(error, RunError):  # what torch says about it has many lines
        what = f"{type(error).__name__}: {remedies.in_one_line(cause)}"
    line = f"rank {ranks.rank} failed: {what}"
    if isinstance(error, RunError):
        text = ""
    return _record(directory, ranks, Exit.FAILED, error, line, text, terminal)


def _record(
    directory: RunDirectory,
    ranks: Ranks,
    status: Exit,
    error: BaseException,
    line: str,
    stack: str,
    terminal: TextIO,
) -> int:
    """Record the failure; if it is the run's first, print `stack`, and return `status`."""
    is_first = last_line.record(directory, ranks.rank, status, error, line)
    if is_first and stack:
        print(stack, file=terminal, flush=True)
    return status
