"""`trainer.num_nodes`: machine 0 freezes the configuration, and all meet at its address."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from lockstep_gpt.config import Config, RunError, UserError
from lockstep_gpt.extras.nodes.address import own_address
from lockstep_gpt.extras.nodes.nodes_settings import NodesLaunch
from lockstep_gpt.launch import start
from lockstep_gpt.run_directory import RunDirectory, differences
from lockstep_gpt.training.schedule import plan_batch

HEARTBEATS = 3  # missed in a row until a machine counts as lost


def start_on_nodes(
    run: RunDirectory,
    settled: dict[str, Any],
    config: Config,
    create: Callable[[], RunDirectory],
) -> int:
    """Run as one of several machines: the first freezes the configuration, the others compare.

    Raises:
        UserError: a setting for several machines is missing, or the machines' settings differ.
        RunError: the first machine did not come.
    """
    launch, nodes = cast(NodesLaunch, config.launch), config.trainer["num_nodes"]
    for name, value in (
        ("run_dir", config.run_dir),
        ("launch.rdzv_endpoint", launch.rdzv_endpoint),
    ):
        if value is None:
            raise UserError(
                f"{name}=null with trainer.num_nodes={nodes}; set it to the same value on all"
            )
    if launch.node_rank >= nodes:
        raise UserError(f"launch.node_rank={launch.node_rank} must be from 0 to {nodes - 1}")
    assert launch.rdzv_endpoint is not None
    own_address(launch.rdzv_endpoint)
    # Fewer machines must be able to run the same experiment; otherwise, fail now, not mid-run.
    batch = replace(config.batch, global_size=settled["batch"]["global_size"])
    for count in range(launch.min_nodes or nodes, nodes):
        plan_batch(batch, config.model.block_size, settled["trainer"]["devices"], count)
    if launch.node_rank == 0:
        create()
    else:
        start.prepared(config)  # at the same time as machine 0, if they do not share a folder
        _wait_for_first_node(run, settled, launch.join_seconds)
        start.prepared(run.load())  # from the configuration of machine 0
    return start.supervise(run, launch.node_rank)


def _wait_for_first_node(run: RunDirectory, settled: dict[str, Any], seconds: float) -> None:
    """Wait until the shared run directory contains the same configuration as this machine's."""
    end = time.monotonic() + seconds
    fault = "lacks config.yaml; check that all machines share it, and that machine 0 has started"
    kind: type[Exception] = RunError  # it may still come
    while time.monotonic() < end:
        if run.config.is_file():
            differing = differences(run.values(), settled)
            if not differing:
                return
            fault = f"has a different configuration than this machine's: {', '.join(differing)}"
            kind = UserError
        time.sleep(0.2)
    raise kind(f"run_dir={run.path}: after {seconds:g} s it {fault}")


def meeting(config: Config, node_rank: int) -> tuple[str, dict[str, Any]]:
    """Return the interface to the other machines, and where and how their agents meet.

    The second value contains arguments for torch's `RendezvousParameters`.
    """
    launch = cast(NodesLaunch, config.launch)
    assert launch.rdzv_endpoint is not None
    address, interface = own_address(launch.rdzv_endpoint)
    return interface, {
        "endpoint": launch.rdzv_endpoint,
        "min_nodes": launch.min_nodes or config.trainer["num_nodes"],
        "local_addr": address,
        "is_host": node_rank == 0,
        "join_timeout": math.ceil(launch.join_seconds),
        "last_call_timeout": math.ceil(2 * launch.lost_seconds),  # to wait for more machines
        "keep_alive_interval": math.ceil(launch.lost_seconds / HEARTBEATS),
        "keep_alive_max_attempt": HEARTBEATS,
    }


def missed(config: Config, cause: str) -> str:
    """Return the message that not all machines came to the meeting."""
    launch = cast(NodesLaunch, config.launch)
    why = f" ({cause})" if cause else ""
    return (
        f"not all of {config.trainer['num_nodes']} machines met at {launch.rdzv_endpoint} within "
        f"launch.join_seconds={launch.join_seconds:g}{why}; start the same command on each, with "
        "its own launch.node_rank"
    )


def end_when_cut_off(agent: Any, config: Config) -> None:
    """End this process if its agent has not checked its ranks for longer than allowed.

    The agent's calls to machine 0 never return if that machine is lost.
    """
    launch = cast(NodesLaunch, config.launch)
    limit = launch.join_seconds + launch.grace_seconds + 2 * launch.lost_seconds

    def watch() -> None:
        while time.monotonic() - agent.looked < limit:
            time.sleep(1)
        print(f"the other machines have been silent for {limit:g} s; ending", file=sys.stderr)
        os._exit(1)  # the ranks end with this process

    threading.Thread(target=watch, daemon=True).start()
