"""`trainer.num_nodes`: machine 0 freezes the configuration, and all meet at its address."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

from lockstep.errors import RunError, UserError
from lockstep.exits import Exit
from lockstep.launch.placement import Launch
from lockstep.ranks.address import is_rehearsal, own_address
from lockstep.ranks.waiting import HINT_SECONDS, print_hint
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory, differences
from lockstep.settings import check

HEARTBEATS = 3  # missed in a row until a machine counts as lost


def check_settings(launch: Launch, run: RunDirectory | None) -> None:
    """Check what one of several machines needs.

    Args:
        launch: how they meet.
        run: the run's directory; None: the user has named none.

    Raises:
        UserError: a setting for several machines is missing, or fewer machines couldn't go on.
    """
    settings = launch.settings
    nodes = launch.nodes
    for name, value, kind in (
        ("run_dir", run and run.path, "folder"),
        ("launch.rdzv_endpoint", settings.rdzv_endpoint, "HOST:PORT of machine 0"),
    ):
        rule = f"with trainer.num_nodes={nodes}; set it to the same {kind} on all"
        check(name, value, value is not None, rule)
    if settings.node_rank >= nodes:
        raise UserError(f"launch.node_rank={settings.node_rank} must be from 0 to {nodes - 1}")
    assert settings.rdzv_endpoint is not None
    own_address(settings.rdzv_endpoint)


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


def rendezvous_parameters(launch: Launch, node_rank: int) -> dict[str, Any]:
    """Return where and how the machines' agents meet, as torch's `RendezvousParameters` take it."""
    settings = launch.settings
    assert settings.rdzv_endpoint is not None
    address, _ = own_address(settings.rdzv_endpoint)
    return {
        "endpoint": settings.rdzv_endpoint,
        "min_nodes": settings.min_nodes or launch.nodes,
        "local_addr": address,
        "is_host": node_rank == 0,
        "join_timeout": math.ceil(settings.join_seconds),
        "last_call_timeout": math.ceil(2 * settings.lost_seconds),  # to wait for more machines
        "keep_alive_interval": math.ceil(settings.lost_seconds / HEARTBEATS),
        "keep_alive_max_attempt": HEARTBEATS,
    }


def explain_missed_rendezvous(launch: Launch, cause: str, is_lost: bool) -> str:
    """Return the message that not all machines came to the meeting.

    Args:
        launch: where and how long they wait.
        cause: an error's message.
        is_lost: whether machine 0 is silent, without which nobody meets.
    """
    settings = launch.settings
    assert settings.rdzv_endpoint is not None
    if "EADDRINUSE" in cause:  # on machine 0, which serves the meeting
        return (
            f"another program listens at {settings.rdzv_endpoint}; end it, or give all machines a "
            "free port in launch.rdzv_endpoint"
        )
    if is_lost:
        place = settings.rdzv_endpoint
        fault = f"machine 0, where all machines meet, has ended or can't be reached at {place}"
    else:
        fault = (
            f"not all of {launch.nodes} machines met at {settings.rdzv_endpoint} "
            f"within launch.join_seconds={settings.join_seconds:g}"
        )
    detail = f" ({cause})" if cause else ""
    remedy = "start the same command on each, with its own launch.node_rank"
    if is_rehearsal(settings.rdzv_endpoint):
        remedy += "; this address is for commands on one machine, so for several, give machine 0's"
    return f"{fault}{detail}; {remedy}"


def end_when_cut_off(agent: Any, launch: Launch, run: RunDirectory, node_rank: int) -> None:
    """End this process if its agent has not checked its ranks for longer than allowed.

    The agent's calls to machine 0 never return if that machine is lost.

    Args:
        agent: notes the clock as `last_check`.
        launch: how long it may be silent.
        run: whose last line is printed.
        node_rank: the number of this machine.
    """
    settings = launch.settings
    limit = settings.join_seconds + settings.grace_seconds + 2 * settings.lost_seconds

    def watch() -> None:
        while time.monotonic() - agent.last_check < limit:
            time.sleep(1)
        last_line.show(run, f"the other machines have been silent for {limit:g} s", node_rank)
        os._exit(Exit.REPORTED)  # the ranks end with this process

    threading.Thread(target=watch, daemon=True).start()
