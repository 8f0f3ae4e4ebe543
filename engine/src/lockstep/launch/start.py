"""How ranks start, in the order in which it happens.

    devices -> the run directory: locked, frozen -> ranks

This process stays light: it doesn't import torch, so it reports mistakes at once, and can set what
the ranks need before torch starts (threads, allocator). Exceptions: launch.inline, launchers.
"""

import contextlib
import os
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

from lockstep import stop_signals
from lockstep.errors import ReportedError, UserError
from lockstep.exits import Ending, Exit
from lockstep.launch import launcher, machines, rank_program, supervise
from lockstep.launch.placement import Launch
from lockstep.memory.ending import release_memory
from lockstep.memory.files import remove_abandoned
from lockstep.processes import end_process
from lockstep.run import last_line, trust
from lockstep.run.directory import RunDirectory
from lockstep.stop_signals import Interrupted

Call = Callable[..., int]  # of a run directory, and where ranks of a launcher have met
Prepare = Callable[[dict[str, Any]], dict[str, Any]]  # as `RunStart.prepare`


class RunStart(Protocol):
    """One start of a run; new and resumed runs differ in how their directory is checked."""

    run: RunDirectory
    values: dict[str, Any]  # of the configuration, with all devices decided
    function: str  # what each rank calls; see `rank_program`
    is_named: bool  # whether `run` is where the user says

    def check(self) -> None:
        """Raise a `UserError` before anything is read or written."""

    def prepare(self, values: dict[str, Any]) -> dict[str, Any]:
        """Write what Hydra would beside the configuration; return the values with it."""

    def freeze(self, values: dict[str, Any]) -> None:
        """Freeze `values` in the directory, which is locked."""

    def undo(self) -> None:
        """Restore what was there before `freeze`."""


class NewRun:
    """The start of a run whose directory doesn't exist yet."""

    def __init__(
        self,
        run: RunDirectory,
        values: dict[str, Any],
        function: str,
        prepare: Prepare,
        *,
        is_named: bool = True,
    ) -> None:
        self.run = run
        self.values = values
        self.function = function
        self.prepare = prepare
        self.is_named = is_named

    def check(self) -> None:
        """Raise a `UserError` if the directory is in use."""
        self.run.refuse_if_used()

    def freeze(self, values: dict[str, Any]) -> None:
        """Create the directory."""
        self.run.create(values)

    def undo(self) -> None:
        """Remove the directory."""
        self.run.discard()


class StartMode(Enum):
    """Where this machine's ranks come from."""

    INLINE = auto()  # this process is the only rank, for a debugger
    AGENT = auto()  # an agent starts them, and restarts them after a kill
    MACHINES = auto()  # the same on several machines, on each of which this command runs
    LAUNCHER = auto()  # torchrun, srun, or another launcher has started this process as a rank


def mode_of(launch: Launch) -> StartMode:
    """Return how the ranks of this run start here."""
    if launcher.is_inside_launcher():
        return StartMode.LAUNCHER
    if launch.nodes > 1:
        return StartMode.MACHINES
    if launch.settings.inline:
        return StartMode.INLINE
    return StartMode.AGENT


def start(run_start: RunStart, call: Call | None = None) -> int:
    """Prepare the run, start its ranks, or run as one of a launcher's; return the exit status.

    Args:
        run_start: a new run, or one that continues.
        call: the `function` of `run_start` where this process is a rank; None: it is imported.
    """
    launch = Launch.of(run_start.values)
    mode = mode_of(launch)
    remove_abandoned()
    with contextlib.ExitStack() as lock:
        freezing = Freezing(run_start, lock)
        try:
            status = _start_ranks(run_start, launch, mode, freezing, call)
        except (UserError, Interrupted):  # the other ranks' configurations differ, for example
            freezing.undo()
            raise
        except (ReportedError, SystemExit):
            raise
        except Exception as error:
            if not freezing.is_done:
                raise
            raise last_line.reported(run_start.run, error) from error
        is_alone = mode in (StartMode.INLINE, StartMode.AGENT)
        # In a new directory, others may still write.
        if status == Exit.MISTAKE and (is_alone or freezing.run_existed):
            freezing.undo()
        if Ending(status).stopped_by and is_alone:
            run = run_start.run
            if not (run.has_begun() or run.has_saved()):
                freezing.undo()
    return status


def _start_ranks(
    run_start: RunStart, launch: Launch, mode: StartMode, freezing: "Freezing", call: Call | None
) -> int:
    function = run_start.function
    match mode:
        case StartMode.INLINE:
            return _run_rank(freezing.freeze(), call or rank_program.imported(function))
        case StartMode.AGENT:
            return supervise.supervise(freezing.freeze(), function)
        case StartMode.MACHINES:
            machines.check_settings(launch, run_start.run if run_start.is_named else None)
            node_rank = launch.settings.node_rank
            if node_rank == 0:
                freezing.freeze()
            else:
                _follow_first_machine(run_start, launch.settings.join_seconds)
            return supervise.supervise(run_start.run, function, node_rank)
        case StartMode.LAUNCHER:
            store = launcher.meet(launch.settings.join_seconds)
            run = launcher.agree(store, run_start.values, freezing.freeze)
            status = _run_rank(run, call or rank_program.imported(function), store)
            if status in (Exit.FAILED, Exit.LOST_PEERS):
                end_process(status)  # a normal exit waits for ranks that may be gone
            return status


class Freezing:
    """The step from settings to a run directory: locked, and frozen."""

    def __init__(self, run_start: RunStart, lock: contextlib.ExitStack) -> None:
        self._run_start = run_start
        self._lock = lock
        self.is_done = False
        self.run_existed = False  # before it was frozen here

    def freeze(self) -> RunDirectory:
        """Return the run directory, which stays locked until this command ends."""
        run_start = self._run_start
        run = run_start.run
        run_start.check()
        self.run_existed = run.config.exists()
        self._lock.enter_context(run.locked())  # two commands may have one folder named after now
        values = run_start.prepare(run_start.values)
        try:
            run_start.freeze(values)
        except Interrupted:
            self.is_done = True  # perhaps, so it must be undone
            raise
        self.is_done = True
        trust.permit(run, trusted=True)
        return run

    def undo(self) -> None:
        """Restore the directory, if this process has frozen it."""
        if self.is_done:
            self._run_start.undo()


def _run_rank(run: RunDirectory, call: Call, store: Any = None) -> int:
    """Run as a rank in this process, which has no agent; return the exit status."""
    summary_before = run.read_summary()
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.ExitStack() as lock:
        if rank > 0:  # rank 0's process has the command's lock
            lock.enter_context(run.lock.of_rank(rank))
        status = call(run, store)
        stop_signals.received.finish()
    if rank == 0:
        supervise.report_unsaved(run, status, summary_before)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        release_memory(run, status)
    return status


def _follow_first_machine(run_start: RunStart, join_seconds: float) -> None:
    """Wait for the configuration that machine 0 freezes; the rest of the run is there before."""
    machines.wait_for_first_machine(run_start.run, run_start.values, join_seconds)
