"""The parent of an agent: starts it, passes signals on to it, and reports how the run ended."""

import contextlib
import logging
import os
import signal
import subprocess
import threading
from typing import Any

from lockstep import stop_signals
from lockstep.damaged_files import read_object
from lockstep.exits import SIGNALS, Ending, Exit, after_signal
from lockstep.launch import agent_program
from lockstep.launch.placement import Launch
from lockstep.memory.ending import release_memory
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory

# For glibc: else each step maps its large tensors again, and the system clears their pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
# For CUDA: segments grow, so blocks of other sizes, as in a validation, don't fragment memory.
GROWING_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
AGENT_SECONDS = 120.0  # that the agent has after a stop signal, besides the ranks' grace
OLD_ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"  # still read, if the new name is not set


def supervise(run: RunDirectory, function: str, node_rank: int = 0) -> int:
    """Start the agent of this machine's ranks, and return the run's exit status.

    Args:
        run: its configuration is frozen.
        function: what each rank calls; see `rank_program`.
        node_rank: the number of this machine.
    """
    summary_before = run.read_summary()
    received = stop_signals.received
    agent = _start_agent(run, function, node_rank)

    def stop_at_once() -> None:
        if run.read_summary() == summary_before:
            stop_signals.say(stop_signals.AT_ONCE)
        agent.send_signal(signal.SIGKILL)

    # The kernel then kills the ranks, too.
    limit = Launch.of(run.resolved()).settings.grace_seconds + AGENT_SECONDS
    killer = threading.Timer(limit, agent.kill)
    killer.daemon = True

    def send(signum: signal.Signals) -> None:
        agent.send_signal(signum)
        killer.start()

    received.pass_on(send, stop_at_once)
    ending = Ending(agent.wait())
    killer.cancel()
    received.finish()
    summary_is_old = run.read_summary() == summary_before
    is_unfinished = ending.code == Exit.DONE and node_rank == 0 and summary_is_old
    status = _status_of(ending, received.first, is_unfinished)
    if node_rank == 0:
        report_unsaved(run, status, summary_before)
    elif ending.killed_by and Ending(status).stopped_by:  # else the agent has printed the line
        _show_unsaved_stop(run, status, node_rank)
    if status == Exit.FAILED and ending.code != Exit.REPORTED:
        last_line.show(run, _cause_of(ending, is_unfinished), node_rank)
    release_memory(run, status)
    return status


def _status_of(ending: Ending, received: signal.Signals | None, is_unfinished: bool) -> int:
    """Return the exit status of a command from the `ending` of its agent."""
    if ending.killed_by and received is not None:  # the agent was killed after a signal to us
        return after_signal(received)
    if ending.killed_by or ending.code == Exit.REPORTED or is_unfinished:
        return Exit.FAILED
    return ending.code


def _cause_of(ending: Ending, is_unfinished: bool) -> str:
    """Return why a run failed whose agent could not say so."""
    if is_unfinished:
        return "a rank ended with status 0 before training ended"
    cause = f"the agent, which starts the ranks, {ending}"
    if ending.killed_by == signal.SIGKILL:
        cause += "; if nobody did that, memory ran out (dmesg)"
    return cause


def report_unsaved(run: RunDirectory, status: int, summary_before: dict[str, Any]) -> None:
    """Record a failure, or a stop before all ranks saved, also if no rank was left to do it."""
    summary, _ = read_object(run.summary)  # no warning may follow the last line
    stopped_by = Ending(status).stopped_by
    if stopped_by and not (run.has_begun() or run.has_saved() or run.has_more()):
        line = "stopped by %s before the first step; nothing is kept: start it again"
        logging.warning(line, SIGNALS[stopped_by])
        return
    is_unsaved_stop = stopped_by > 0 and (summary == summary_before or not summary.get("saved"))
    if is_unsaved_stop:
        outcome = "stopped"
    elif status == Exit.FAILED:
        outcome = "failed"
    else:
        return
    with contextlib.suppress(OSError):  # a full disk, already reported
        run.write_summary({**summary, "status": outcome, "saved": False})
    if is_unsaved_stop:
        _show_unsaved_stop(run, status)


def _show_unsaved_stop(run: RunDirectory, status: int, node_rank: int = 0) -> None:
    name = SIGNALS[Ending(status).stopped_by]
    hint = last_line.way_on(run, node_rank)
    logging.warning("stopped by %s before all ranks saved; %s", name, hint)


def _start_agent(run: RunDirectory, function: str, node_rank: int) -> subprocess.Popen[bytes]:
    # In its own session: a Ctrl-C reaches the ranks once, through us.
    words = agent_program.command(run, node_rank, function)
    environment = rank_environment(Launch.of(run.resolved()))
    return subprocess.Popen(words, env=environment, start_new_session=True)


def rank_environment(launch: Launch) -> dict[str, str]:
    """Return variables that libraries of agent and ranks read at load; the user's values stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = str(max(1, (cores or 1) // launch.devices))
    environment = {"OMP_NUM_THREADS": threads}
    # Each rank would start as many compilers as there are cores.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = threads
    accelerator = launch.placement.accelerator
    if accelerator == "cpu" and launch.settings.keep_memory:
        environment |= KEEP_MEMORY
    if accelerator == "cuda" and OLD_ALLOCATOR_SETTINGS not in os.environ:
        environment |= GROWING_SEGMENTS
    return {**environment, **os.environ}
