"""`trainer.num_nodes`: machine 0 freezes the configuration, and all meet at its address."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace
from typing import Any

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.address import is_rehearsal, own_address
from lockstep_gpt.distributed.waiting import HINT_SECONDS, print_hint
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.exits import Exit
from lockstep_gpt.run import last_line
from lockstep_gpt.run.directory import RunDirectory, differences
from lockstep_gpt.settings import check
from lockstep_gpt.training.schedule import plan_batch

HEARTBEATS = 3  # missed in a row until a machine counts as lost


def check_settings(config: Config, values: dict[str, Any]) -> None:
    """Check what one of several machines needs.

    Args:
        config: the checked configuration.
        values: the plain values that this machine would freeze.

    Raises:
        UserError: a setting for several machines is missing, or fewer machines couldn't go on.
    """
    launch = config.launch
    nodes = config.trainer["num_nodes"]
    for name, value, kind in (
        ("run_dir", config.run_dir, "folder"),
        ("launch.rdzv_endpoint", launch.rdzv_endpoint, "HOST:PORT of machine 0"),
    ):
        rule = f"with trainer.num_nodes={nodes}; set it to the same {kind} on all"
        check(name, value, value is not None, rule)
    if launch.node_rank >= nodes:
        raise UserError(f"launch.node_rank={launch.node_rank} must be from 0 to {nodes - 1}")
    assert launch.rdzv_endpoint is not None
    own_address(launch.rdzv_endpoint)
    # Fewer machines must be able to run the same experiment; otherwise, fail now, not mid-run.
    batch = replace(config.batch, global_size=values["batch"]["global_size"])
    for count in range(launch.min_nodes or nodes, nodes):
        devices = values["trainer"]["devices"]
        plan_batch(batch, config.tokens_per_sample or 0, devices, count, config.tensor_parallel)


def wait_for_first_machine(run: RunDirectory, values: dict[str, Any], seconds: float) -> None:
    """Wait until machine 0 has frozen the configuration that this machine has composed.

    Args:
        run: the run directory, which all machines share.
        values: the plain values that this machine would freeze.
        seconds: the longest wait.

    Raises:
        RunError: machine 0 did not come.
        UserError: its settings differ.
    """
    started = time.monotonic()
    has_hinted = False
    fault = "lacks config.yaml; check that all machines share it, and that machine 0 has started"
    error_class: type[Exception] = RunError  # it may still come
    while time.monotonic() < started + seconds:
        if run.config.is_file():
            differing = differences(run.values(), values)
            if not differing:
                return
            fault = f"has a different configuration than this machine's: {', '.join(differing)}"
            error_class = UserError
        if not has_hinted and time.monotonic() > started + HINT_SECONDS:
            limit = f"at most launch.join_seconds={seconds:g} s"
            print_hint(f"waiting for machine 0, {limit}: run_dir={run.path} {fault}")
            has_hinted = True
        time.sleep(0.2)
    raise error_class(f"run_dir={run.path}: after {seconds:g} s it {fault}")


def rendezvous_parameters(config: Config, node_rank: int) -> dict[str, Any]:
    """Return where and how the machines' agents meet, as torch's `RendezvousParameters` take it."""
    launch = config.launch
    assert launch.rdzv_endpoint is not None
    address, _ = own_address(launch.rdzv_endpoint)
    return {
        "endpoint": launch.rdzv_endpoint,
        "min_nodes": launch.min_nodes or config.trainer["num_nodes"],
        "local_addr": address,
        "is_host": node_rank == 0,
        "join_timeout": math.ceil(launch.join_seconds),
        "last_call_timeout": math.ceil(2 * launch.lost_seconds),  # to wait for more machines
        "keep_alive_interval": math.ceil(launch.lost_seconds / HEARTBEATS),
        "keep_alive_max_attempt": HEARTBEATS,
    }


def explain_missed_rendezvous(config: Config, cause: str, is_lost: bool) -> str:
    """Return the message that not all machines came to the meeting.

    Args:
        config: where and how long they wait.
        cause: an error's message.
        is_lost: whether machine 0 is silent, without which nobody meets.
    """
    launch = config.launch
    assert launch.rdzv_endpoint is not None
    if is_lost:
        place = launch.rdzv_endpoint
        fault = f"machine 0, where all machines meet, has ended or can't be reached at {place}"
    else:
        fault = (
            f"not all of {config.trainer['num_nodes']} machines met at {launch.rdzv_endpoint} "
            f"within launch.join_seconds={launch.join_seconds:g}"
        )
    detail = f" ({cause})" if cause else ""
    remedy = "start the same command on each, with its own launch.node_rank"
    if is_rehearsal(launch.rdzv_endpoint):
        remedy += "; this address is for commands on one machine, so for several, give machine 0's"
    return f"{fault}{detail}; {remedy}"


def end_when_cut_off(agent: Any, config: Config, run: RunDirectory, node_rank: int) -> None:
    """End this process if its agent has not checked its ranks for longer than allowed.

    The agent's calls to machine 0 never return if that machine is lost.

    Args:
        agent: notes the clock as `last_check`.
        config: how long it may be silent.
        run: whose last line is printed.
        node_rank: the number of this machine.
    """
    launch = config.launch
    limit = launch.join_seconds + launch.grace_seconds + 2 * launch.lost_seconds

    def watch() -> None:
        while time.monotonic() - agent.last_check < limit:
            time.sleep(1)
        last_line.show(run, f"the other machines have been silent for {limit:g} s", node_rank)
        os._exit(Exit.REPORTED)  # the ranks end with this process

    threading.Thread(target=watch, daemon=True).start()
