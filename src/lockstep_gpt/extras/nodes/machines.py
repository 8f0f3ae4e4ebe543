"""`trainer.num_nodes`: the first machine freezes the configuration, and all meet at its address."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.launch import devices, start
from lockstep_gpt.run_directory import RunDirectory, differences


def start_on_nodes(
    run: RunDirectory,
    settled: dict[str, Any],
    config: Config,
    create: Callable[[], RunDirectory],
) -> int:
    """Be one of several machines: the first freezes the configuration, the others compare.

    Raises:
        UserError: a setting that several machines need is missing, or theirs do not agree.
    """
    launch, nodes = config.launch, config.trainer["num_nodes"]
    for name, value in (
        ("run_dir", config.run_dir),
        ("launch.rdzv_endpoint", launch.rdzv_endpoint),
    ):
        if value is None:
            raise UserError(f"{name}=null with trainer.num_nodes={nodes}; set it alike on all")
    if launch.node_rank >= nodes:
        raise UserError(f"launch.node_rank={launch.node_rank} must be below {nodes}, from 0 on")
    assert launch.rdzv_endpoint is not None
    devices.own_address(launch.rdzv_endpoint)
    if launch.node_rank == 0:
        create()
    else:
        start.prepared(config)
        _wait_for_first_node(run, settled, launch.join_seconds)
    return start.supervise(run, launch.node_rank)


def _wait_for_first_node(run: RunDirectory, settled: dict[str, Any], seconds: float) -> None:
    """Wait until the shared run directory holds the configuration that this machine has."""
    end = time.monotonic() + seconds
    fault = "has no config.yaml; is it a folder that all machines share, and machine 0 started?"
    while time.monotonic() < end:
        if run.config.is_file():
            differing = differences(run.values(), settled)
            if not differing:
                return
            fault = f"is of another configuration than this machine's: {', '.join(differing)}"
        time.sleep(0.2)
    raise UserError(f"run_dir={run.path}: after {seconds:g} s it {fault}")


def meeting(config: Config, node_rank: int) -> tuple[str, dict[str, Any]]:
    """Return the interface to the other machines, and where and how their agents meet.

    The latter as arguments of torch's `RendezvousParameters`.
    """
    launch = config.launch
    assert launch.rdzv_endpoint is not None
    address, interface = devices.own_address(launch.rdzv_endpoint)
    return interface, {
        "endpoint": launch.rdzv_endpoint,
        "min_nodes": launch.min_nodes or config.trainer["num_nodes"],
        "local_addr": address,
        "is_host": node_rank == 0,
    }
