"""The parent of an agent: starts it, passes signals on to it, and reports how the run ended."""

import contextlib
import logging
import os
import signal
import subprocess
from types import FrameType
from typing import Any

from lockstep_gpt import processes
from lockstep_gpt.config import Config
from lockstep_gpt.exits import Ending, Exit, after_signal
from lockstep_gpt.launch import agent_program
from lockstep_gpt.registry import optional_part
from lockstep_gpt.run import last_line
from lockstep_gpt.run.directory import RunDirectory

# For glibc: else each step maps its large tensors again, and the system clears their pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def supervise(run: RunDirectory, node_rank: int = 0) -> int:
    """Start the agent of this machine's ranks, and return the run's exit status."""
    summary_before = run.read_summary()
    received: list[signal.Signals] = []
    agent: Any = None  # like `subprocess.Popen`

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        is_second_interrupt = signum == signal.SIGINT and signal.SIGINT in received
        received.append(signal.Signals(signum))
        if agent is None:  # there is no agent yet to pass it on to
            raise KeyboardInterrupt
        if is_second_interrupt:
            agent.send_signal(signal.SIGKILL)
            return
        agent.send_signal(signum)
        if signum == signal.SIGINT:
            print("\nsaving after this step; press Ctrl-C again to stop at once", flush=True)

    handlers = {signum: signal.signal(signum, pass_on) for signum in processes.STOP_SIGNALS}
    try:
        with sharing_servers():  # kept alive: it created what its forks share
            agent = _start_agent(run, node_rank)
            ending = Ending(agent.wait())
    except KeyboardInterrupt:
        ending = Ending(-received[0])
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    summary_is_old = run.read_summary() == summary_before
    is_unfinished = ending.code == Exit.DONE and node_rank == 0 and summary_is_old
    status = _status_of(ending, received, is_unfinished)
    if node_rank == 0:
        _report_unsaved(run, status, received, summary_is_old)
    if status == Exit.FAILED and ending.code != Exit.REPORTED:
        last_line.show(run, _cause_of(ending, is_unfinished), node_rank)
    return status


def _status_of(ending: Ending, received: list[signal.Signals], is_unfinished: bool) -> int:
    """Return the exit status of a command from the `ending` of its agent."""
    if ending.killed_by and received:  # the agent was killed after a signal to us
        return after_signal(received[0])
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


def _report_unsaved(
    run: RunDirectory, status: int, received: list[signal.Signals], summary_is_old: bool
) -> None:
    """Record a failure, or a stop before all ranks saved, also if no rank was left to do it."""
    is_unsaved_stop = bool(received) and Ending(status).stopped_by > 0 and summary_is_old
    if is_unsaved_stop:
        outcome = "stopped"
    elif status == Exit.FAILED:
        outcome = "failed"
    else:
        return
    with contextlib.suppress(OSError):  # a full disk, already reported
        run.write_summary({**run.read_summary(), "status": outcome, "saved": False})
    if is_unsaved_stop:
        hint = last_line.way_on(run)
        logging.warning("stopped by %s before all ranks saved; %s", received[0].name, hint)


def _start_agent(run: RunDirectory, node_rank: int) -> Any:
    """Start the agent: a fork of a process that has imported everything, or a new process."""
    config = run.load()
    environment = rank_environment(config)
    servers = forking_servers()
    if servers is not None:
        forked_agent = servers.start_agent(run, node_rank, config, environment)
        if forked_agent is not None:
            return forked_agent
    # In its own session: a Ctrl-C reaches the ranks once, through us.
    words = agent_program.command(run, node_rank)
    return subprocess.Popen(words, env=environment, start_new_session=True)


def sharing_servers() -> contextlib.AbstractContextManager[None]:
    """Let runs started meanwhile, the jobs of a sweep, be forks of the same process."""
    servers = forking_servers()
    if servers is None:
        return contextlib.nullcontext()
    sharing: contextlib.AbstractContextManager[None] = servers.keep_servers()
    return sharing


def forking_servers() -> Any:
    """Return the module that forks agents from a process that has imported everything, or None."""
    return optional_part("warm", "server")


def rank_environment(config: Config) -> dict[str, str]:
    """Return variables that libraries of agent and ranks read at load; the user's values stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // config.trainer["devices"])
    environment = {"OMP_NUM_THREADS": str(threads)}
    if config.launch.keep_memory and config.trainer["accelerator"] == "cpu":
        environment |= KEEP_MEMORY
    return {**environment, **os.environ}
