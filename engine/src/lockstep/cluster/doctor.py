"""The `doctor` command: check whether these machines are ready for training.

Outside a launcher, it starts the ranks that the configuration asks for, as a launcher would. Inside
a launcher, it is one of the ranks, on every node. The parent stays light: only ranks import torch.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lockstep import processes, project
from lockstep.cluster import environment
from lockstep.cluster.report import FAILURE, Report, failure
from lockstep.errors import UserError
from lockstep.launch import devices, flags, hydra_job, launcher, slurm, targets
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.launch.main import training
from lockstep.launch.placement import Placement
from lockstep.ranks.address import own_address

WAIT = 45.0  # seconds: including the startup, a missing rank is reported within a minute
WAITS, WORK = 4, 60.0  # at most this many waits in a row, and seconds of measuring
MARGIN = 5.0  # the parent waits this many seconds longer than its ranks
HELP = f"""usage: PROGRAM doctor [flags] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Check the machines that a run would use: versions, devices, environment variables, host names,
rendezvous, shared memory, disks, the run directory, clocks, and topology. Then check that
collectives are correct, how fast they are, which ranks are slow, and that a DDP step equals a
one-process step on the whole batch. Settings are those of PROGRAM train. doctor starts as
many ranks as train if no launcher such as torchrun has started them. Examples:

  PROGRAM doctor trainer=cpu trainer.devices=2
  PROGRAM doctor trainer.num_nodes=2 launch.rdzv_endpoint=HOST:PORT launch.node_rank=0
  torchrun --nnodes=2 --nproc_per_node=8 ... -m PACKAGE doctor

  --wait SECONDS            longest wait for another rank, {WAIT:.0f} by default
  --save-profile FILE.json  save the measurements for PROGRAM plan --hardware FILE.json
  --json                    print everything as JSON

Each check prints one line: ok, warning, or failure, with the fix. Exit status 1 after a failure."""


def main(arguments: list[str]) -> int:
    """Examine the machines for the configuration in `arguments`; return 1 if any check failed."""
    parser = flags.Parser("doctor", HELP)
    parser.add_argument("--wait", type=flags.above_zero, default=WAIT)
    parser.add_argument("--save-profile", type=Path)
    parser.add_argument("--json", action="store_true")
    options, overrides = parser.split(arguments)
    statuses = []
    for values, config in flags.each_job(training(), overrides, _values_and_config):
        slurm.become_rank(LaunchSettings.of(values))
        if launcher.has_rank():
            statuses.append(_examine(values, config, options))
        else:
            statuses.append(_start(values, options, arguments))
    return max(statuses)


def _values_and_config(config: DictConfig) -> tuple[dict[str, Any], DictConfig]:
    values = hydra_job.values_to_freeze(config)
    targets.refuse_mistakes(values, {"*": ("*",)})  # the program may add any argument
    return values, config


def _examine(values: dict[str, Any], config: DictConfig, options: Any) -> int:
    """Run as one rank. Rank 0 reports for all; other ranks print only if they cannot reach it."""
    wrong = environment.examine_launcher(os.environ)
    if any(finding.status == FAILURE for finding in wrong):
        return _show(Report(1, wrong), options)
    processes.end_with_parent(os.getppid())
    faulthandler.dump_traceback_later(_longest(options), exit=True)
    # Set before torch is imported: no messages about retries, and NCCL raises instead of aborting.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    gc.disable()
    started = time.monotonic()
    from lockstep.cluster.examination import Examination
    from lockstep.ranks.ranks import Ranks

    took = time.monotonic() - started
    gc.freeze()
    gc.enable()
    ranks = Ranks.from_environment()
    examination = Examination(config, values, ranks, options.wait, took, options.save_profile)
    report = examination.run()
    if ranks.rank == 0:
        return _show(report, options)
    if report.findings:
        print(f"rank {ranks.rank} says:\n{report.as_text()}", file=sys.stderr)
    return int(examination.status == FAILURE)


def _show(report: Report, options: Any) -> int:
    print(report.as_json() if options.json else report.as_text(), flush=True)
    return report.exit_status


def _start(values: dict[str, Any], options: Any, arguments: list[str]) -> int:
    """Start this machine's ranks, wait for them, and return the first rank's exit status."""
    wrong = environment.examine_tasks(os.environ)
    try:
        settings = LaunchSettings.of(values)
        placement = devices.found(values, settings)
        common = _environment(settings, placement)
    except UserError as error:
        wrong.append(failure("launcher", str(error), "change that setting"))
    if wrong:
        return _show(Report(1, wrong), options)
    first = settings.node_rank * placement.devices
    ranks = [
        subprocess.Popen(
            project.current().command("doctor", *arguments),
            env={**os.environ, **common, "RANK": str(first + local), "LOCAL_RANK": str(local)},
        )
        for local in range(placement.devices)
    ]
    return _wait(ranks, first, options)


def _environment(settings: LaunchSettings, placement: Placement) -> dict[str, str]:
    """Return the variables that torchrun would set, and training's thread count and interface.

    Raises:
        UserError: there are several machines, but no endpoint where they meet.
    """
    nodes = placement.nodes
    if nodes == 1:
        endpoint = f"127.0.0.1:{_free_port()}"
        interface = "lo"
    else:
        endpoint = settings.rdzv_endpoint or ""
        if not endpoint:
            raise UserError(
                f"launch.rdzv_endpoint=null with trainer.num_nodes={nodes}; set it to the same "
                "HOST:PORT of machine 0 on all, and launch.node_rank on each"
            )
        _, interface = own_address(endpoint)
    host, _, port = endpoint.rpartition(":")
    usual = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // placement.devices)),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": "=lo" if nodes == 1 else "",  # it may use several to other machines
    }
    return {
        **{name: os.environ.get(name, value) for name, value in usual.items() if value},
        "WORLD_SIZE": str(placement.devices * nodes),
        "LOCAL_WORLD_SIZE": str(placement.devices),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _longest(options: Any) -> float:
    """Return the number of seconds after which an examination must have ended."""
    return float(WAITS * options.wait + WORK)


def _wait(ranks: list[subprocess.Popen[bytes]], number: int, options: Any) -> int:
    """Return the exit status of the first of `ranks`, which has the global rank `number`.

    No rank runs longer than all waits together can take.
    """
    try:
        status = ranks[0].wait(timeout=_longest(options) + MARGIN)
    except subprocess.TimeoutExpired:
        line = f"rank {number} did not end within {_longest(options) + MARGIN:.0f} s"
        status = _show(Report(len(ranks), [failure("doctor", line, "see its stack")]), options)
    finally:
        end = time.monotonic() + MARGIN
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()
    if status < 0:
        line = f"rank {number} was killed by {signal.Signals(-status).name}"
        fix = "see the system's log; SIGKILL often means that memory ran out"
        return _show(Report(len(ranks), [failure("doctor", line, fix)]), options)
    return status
