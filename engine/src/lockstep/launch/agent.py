"""Starts, watches, and restarts one node's ranks through torchrun's elastic agent.

It is its own process because the parent must not import torch. Ranks restart only after a kill.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

from lockstep import processes, standard_streams, stop_signals
from lockstep.errors import UserError
from lockstep.exits import (
    Ending,
    Exit,
    after_signal,
    describe_endings,
    failed_endings,
)
from lockstep.launch import machines, meeting, rank_program
from lockstep.launch.first_signal import FirstSignal
from lockstep.launch.placement import Launch
from lockstep.launch.shared_stop import SharedStop
from lockstep.patches.python import run_exit_handlers
from lockstep.patches.torch import (
    free_ports_at,
    handle_signals_with,
    name_callers_without_source,
    processes_of,
)
from lockstep.ranks.address import LOOPBACK
from lockstep.run import deaths, last_line
from lockstep.run.directory import RunDirectory

MONITOR_SECONDS = 0.1  # between looks at other machines; an end of a rank is seen at once
FAILURE_GRACE = 5  # seconds that the other ranks have after one raises an error


@standard_streams.never_failing()
def main(run: RunDirectory, node_rank: int, function: str) -> int:
    """Run the ranks of `run` on this node with an agent; return the exit status.

    Args:
        run: its configuration is frozen.
        node_rank: the number of this machine.
        function: what each rank calls; see `rank_program`.
    """
    name_callers_without_source()
    free_ports_at(LOOPBACK)
    first_signal = FirstSignal()
    handle_signals_with(first_signal)
    for signum in stop_signals.handled_signals():
        signal.signal(signum, first_signal)
    launch = Launch.of(run.resolved())
    has_peers = launch.nodes > 1
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
        try:
            if has_peers:
                rendezvous = machines.rendezvous_parameters(launch, node_rank)
            else:
                rendezvous = _rendezvous_of_one_node(folder)
            _set_environment(launch)
            agent = RankAgent(run, launch, function, rendezvous, folder, first_signal)
            if has_peers:
                machines.end_when_cut_off(agent, launch, run, node_rank)
            return agent.run_to_end(node_rank)
        except UserError as error:
            print(f"{processes.program_name()}: {error}", file=sys.stderr)
            return Exit.MISTAKE
        except SignalException as stop:
            return after_signal(stop.sigval)
        except RendezvousError as error:
            cause = str(error.__cause__ or error)
            line = cause
            if has_peers:
                is_lost = isinstance(error, RendezvousConnectionError)
                line = machines.explain_missed_rendezvous(launch, cause, is_lost)
            last_line.show(run, f"{processes.program_name()}: {line}", node_rank)
            return Exit.REPORTED
        except Exception as error:  # the system's limits, for example
            run_exit_handlers()  # those of libraries may print
            last_line.show_error(run, error, node_rank)
            return Exit.REPORTED


def _rendezvous_of_one_node(folder: str) -> dict[str, Any]:
    """Return where a single node's agent meets itself, as `RendezvousParameters` takes it."""
    return {
        "endpoint": f"{folder}/store",
        "store_type": "file",
        "min_nodes": 1,
        "local_addr": LOOPBACK,
    }


def _set_environment(launch: Launch) -> None:
    """Set variables that only agent and ranks need."""
    # Rank 0 serves the ranks' store, at an address that only this machine reaches if it is alone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    names = [signum.name for signum in stop_signals.handled_signals()]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(names)
    if not launch.is_verbose:
        for name in logging.root.manager.loggerDict:  # each has its own level
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


class RankAgent(LocalElasticAgent):
    """The elastic agent that restarts ranks only after a signal killed one."""

    def __init__(
        self,
        run: RunDirectory,
        launch: Launch,
        function: str,
        rendezvous: dict[str, Any],
        folder: str,
        first_signal: FirstSignal,
    ) -> None:
        handler, store = meeting.connect(run.hash(), launch, rendezvous)
        program, *arguments = rank_program.command(run, function)
        spec = WorkerSpec(
            role="rank",
            local_world_size=launch.devices,
            entrypoint=program,
            args=tuple(arguments),
            rdzv_handler=handler,
            max_restarts=launch.settings.max_restarts,
            monitor_interval=0.001,  # `_monitor_workers` waits; torch refuses 0
            local_addr=rendezvous["local_addr"],
        )
        barrier = rendezvous.get("last_call_timeout", 30)  # as at the start; torch's own: 300
        super().__init__(spec, DefaultLogsSpecs(log_dir=folder), exit_barrier_timeout=barrier)
        self._run = run
        self._launch = launch
        self._first_signal = first_signal
        has_store = bool(rendezvous.get("is_host"))
        stops_all = has_store or not launch.settings.min_nodes  # without it, others can go on
        group = self.get_worker_group()
        self._shared_stop = SharedStop(
            group, store, first_signal, stops_all=stops_all, has_store=has_store
        )
        self._shutdown_timeout = math.ceil(launch.settings.grace_seconds)  # torch's own: 30
        self._ended: dict[int, Ending] = {}  # global rank -> how it ended the attempt
        self._aborted = False  # the previous attempt ended by SIGABRT alone
        self.last_check = time.monotonic()  # of its ranks

    def run_to_end(self, node_rank: int) -> int:
        """Run the ranks to their end, or to a stop signal; return the exit status."""
        try:
            return self.status(self.run(), node_rank)
        except SignalException as stop:
            self._shared_stop.leave()
            status = self._status_after(stop.sigval, node_rank)
            self._shared_stop.report(self._run, status, node_rank)
            return status

    def _status_after(self, signum: signal.Signals, node_rank: int) -> int:
        """Return the exit status after a signal: 0 if the ranks were about to end anyway."""
        status = self._show_failure(node_rank)  # of the save, for example
        if status is not None:
            return status
        endings = [Ending(process.poll() or 0) for process in self._processes().values()]
        if endings and all(ending.code == Exit.DONE for ending in endings):
            return Exit.DONE
        stops = [ending.code for ending in endings if ending.stopped_by]
        return (stops or [after_signal(signum)])[0]

    def _processes(self) -> dict[int, Any]:
        """Return local rank -> its process, which is like a `Popen`."""
        handlers = getattr(processes_of(self), "subprocess_handlers", {})
        return {rank: handler.proc for rank, handler in handlers.items()}

    def live_ranks(self) -> list[int]:
        """Return the process ids of ranks that have not ended."""
        return [process.pid for process in self._processes().values() if process.poll() is None]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        def meet_once() -> None:
            self.last_check = time.monotonic()
            super(RankAgent, self)._rendezvous(worker_group)

        with self._shared_stop.followed_by_thread():
            meeting.meet(meet_once, self._launch)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._failed_ranks(worker_group):
            processes.wait_for_end(self.live_ranks(), MONITOR_SECONDS)
        self._first_signal.raise_received()  # if a library has swallowed the exception
        self.last_check = time.monotonic()
        self._ended = self._failed_ranks(worker_group)
        if self._ended:
            self._wait_for_cause(worker_group)
        self._shared_stop.follow(at_once=bool(self._ended))
        if self._ended:
            restartable = self._is_restartable()
            self._end_others(restartable)
            if not restartable:
                self._remaining_restarts = 0
            if self._remaining_restarts:
                total = worker_group.spec.max_restarts
                number = total - self._remaining_restarts + 1
                line = f"restarting all ranks ({number} of {total})"
                print(f"{describe_endings(self._ended)}; {line}", file=sys.stderr)
        try:
            return cast(RunResult, super()._monitor_workers(worker_group))
        except UnboundLocalError as error:  # torch's timer, if a signal comes as it starts
            raise (error.__context__ or error) from None

    def _failed_ranks(self, worker_group: WorkerGroup) -> dict[int, Ending]:
        ranks = self._processes()
        codes = {
            worker.global_rank: ranks[worker.local_rank].poll()
            for worker in worker_group.workers
            if worker.local_rank in ranks
        }
        return failed_endings(codes)

    def _wait_for_cause(self, worker_group: WorkerGroup) -> None:
        """Wait for the rank that others have lost: its connections end before its process does."""
        limit = time.monotonic() + FAILURE_GRACE
        while all(ending.lost_peers for ending in self._ended.values()):
            seconds = limit - time.monotonic()
            if seconds <= 0 or not self.live_ranks():
                return  # it was on another machine, or hangs
            processes.wait_for_end(self.live_ranks(), seconds)
            self._ended = self._failed_ranks(worker_group)

    def _is_restartable(self) -> bool:
        """Return whether all ended ranks were killed, lost their peers, or were told to stop.

        A signal to the whole run never gets here: it ends the agent first. A rank that aborts twice
        in a row, as NCCL's watchdog makes it do, would abort again.
        """
        endings = self._ended.values()
        killers = {ending.killed_by for ending in endings if ending.killed_by}
        has_aborted = killers == {signal.SIGABRT}
        aborts_again = has_aborted and self._aborted
        self._aborted = has_aborted
        if aborts_again or self._run.failed.exists():
            return False
        return all(ending.killed_by or ending.lost_peers or ending.stopped_by for ending in endings)

    def _end_others(self, restartable: bool) -> None:
        """End the other ranks before torch's agent does, which would wait 30 s for each."""
        if any(ending.stopped_by for ending in self._ended.values()):
            # All stop together, after saving.
            self._shutdown(signal.SIGTERM, self._shutdown_timeout)
        elif restartable:
            # Blocked in a collective with a dead rank, they miss other signals.
            self._shutdown(signal.SIGKILL, 1)
        else:
            self._shutdown()

    # The defaults also serve restarts after a loss elsewhere: inside NCCL, ranks miss SIGTERM.
    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = FAILURE_GRACE
    ) -> None:
        self._shared_stop.announce()
        ranks = processes_of(self)
        if not ranks:
            return
        if death_sig != signal.SIGKILL:
            self._stop_ranks(death_sig, timeout)
            death_sig, timeout = signal.SIGKILL, 1  # of those that are left
        ranks.close(death_sig, timeout)

    def _stop_ranks(self, signum: signal.Signals, seconds: float) -> None:
        """Signal the ranks, and wait for their end.

        Torch would signal their process groups: a rank fails if that ends a worker of its loader.
        """
        for pid in self.live_ranks():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signum)
        limit = time.monotonic() + seconds
        while (live := self.live_ranks()) and (left := limit - time.monotonic()) > 0:
            processes.wait_for_end(live, left)

    def status(self, result: RunResult, node_rank: int) -> int:
        """Print the last line of a failed run; return the exit status of this agent."""
        if not result.is_failed():
            return 0
        files = [failure.error_file_data for failure in result.failures.values()]
        handed_over = [data for data in files if "line" in data]
        status = self._show_failure(node_rank, handed_over)
        if status is not None:
            return status
        deliberate = [ending.code for ending in self._ended.values() if ending.is_deliberate]
        if deliberate:
            return deliberate[0]
        explanation = deaths.explain_deaths(self._run, self._ended)
        if explanation:
            print(explanation, file=sys.stderr)
        cause = describe_endings(self._ended)
        if any(ending.code == Exit.FAILED for ending in self._ended.values()):
            cause += "; its last output, above or in ranks/, says why"
        elif all(ending.killed_by or ending.lost_peers for ending in self._ended.values()):
            cause += "; no restarts are left"
        last_line.show(self._run, cause, node_rank)
        return Exit.REPORTED

    def _show_failure(
        self, node_rank: int, handed_over: Iterable[dict[str, Any]] = ()
    ) -> int | None:
        """Print the last line of a failure that a rank recorded; return the exit status."""
        status = last_line.show_recorded(self._run, node_rank, handed_over)
        if status == Exit.FAILED:
            return Exit.REPORTED
        return status
