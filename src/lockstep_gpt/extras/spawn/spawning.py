"""Starts the ranks of one machine from one process; a rank that was killed stays dead."""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import FrameType

from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from lockstep_gpt import processes
from lockstep_gpt.config import Config
from lockstep_gpt.launch.agent import FAILURE_GRACE, causes
from lockstep_gpt.run_directory import RunDirectory


def start(run: RunDirectory, config: Config) -> int:
    """Start the ranks from this one process, without restarts; return the run's exit status."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    devices = config.trainer["devices"]
    context = start_processes(  # type: ignore[no-untyped-call]
        _spawned_rank, (devices, port, run), devices, join=False, start_method="spawn"
    )

    def forward(signum: int, _frame: FrameType | None) -> None:
        for pid in context.pids():
            os.kill(pid, signum)

    for signum in processes.STOP_SIGNALS:
        signal.signal(signum, forward)
    try:
        while not context.join(grace_period=FAILURE_GRACE):
            pass
    except ProcessExitedException as error:
        if failure := run.read_failure():
            return int(failure["status"])
        code = error.exit_code
        if code < 0 or code == processes.LOST_PEERS:
            print(f"{causes({error.error_index: code})}; no restart is left", file=sys.stderr)
        return code if code == 2 or code > 128 else 1
    return 0


def _spawned_rank(local_rank: int, devices: int, port: int, run: RunDirectory) -> None:
    from lockstep_gpt.training import train

    processes.end_with_parent()
    size = {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices}
    place = {"RANK": local_rank, "LOCAL_RANK": local_rank, "NODE_RANK": 0}
    variables = {**size, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    processes.end_process(train.main(run))
