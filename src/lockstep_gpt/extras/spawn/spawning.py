"""Start the ranks of one machine from one process; a rank that was killed is not restarted."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from multiprocessing.connection import wait
from types import FrameType

from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    start_processes,
)

from lockstep_gpt import processes
from lockstep_gpt.config import Config
from lockstep_gpt.launch.agent import FAILURE_GRACE, causes
from lockstep_gpt.run_directory import RunDirectory


def start(run: RunDirectory, config: Config) -> int:
    """Start the ranks from this process, without restarts; return the run's exit status."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    devices = config.trainer["devices"]
    context = start_processes(  # type: ignore[no-untyped-call]
        _spawned_rank, (devices, port, run), devices, join=False, start_method="spawn"
    )

    stops: list[int] = []

    def end(signum: int) -> None:
        for process in context.processes:
            if process.exitcode is None:
                os.kill(process.pid, signum)

    def forward(signum: int, _frame: FrameType | None) -> None:
        stops.append(signum)
        signal.alarm(math.ceil(config.launch.grace_seconds))
        end(signum)

    for signum in processes.STOP_SIGNALS:
        signal.signal(signum, forward)
    signal.signal(signal.SIGALRM, lambda *_: end(signal.SIGKILL))
    try:
        while not context.join(grace_period=_grace(context, config)):
            pass
    except ProcessExitedException as error:
        if failure := run.read_failure():
            return int(failure["status"])
        code = error.exit_code
        if stops and code < 0:
            return 128 + stops[0]
        if code < 0 or code == processes.LOST_PEERS:
            print(f"{causes({error.error_index: code})}; no restarts are left", file=sys.stderr)
        return code if code == 2 or code > 128 else 1
    finally:
        signal.alarm(0)
    return 0


def _grace(context: ProcessContext, config: Config) -> float:
    """Wait until a rank has ended; return how many seconds the others then have.

    If a rank was stopped by a signal, the others may still be writing in the background.
    """
    ended = [context.processes[context.sentinels[each]] for each in wait([*context.sentinels])]
    for process in ended:
        process.join()
    stopped = any(process.exitcode > 128 for process in ended)
    return config.launch.grace_seconds if stopped else FAILURE_GRACE


def _spawned_rank(local_rank: int, devices: int, port: int, run: RunDirectory) -> None:
    from lockstep_gpt.training import train

    processes.end_with_parent()
    size = {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices}
    place = {"RANK": local_rank, "LOCAL_RANK": local_rank, "NODE_RANK": 0}
    variables = {**size, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    processes.end_process(train.main(run))
