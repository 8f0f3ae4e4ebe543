"""Environment variables that torch, NCCL, and wandb read: refuses what they can't use.

They would fail late, in each rank and with a stack, or go on with another value.
"""

import os
import re
import socket

from lockstep_gpt.config import Config
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.settings import check, check_choice

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
WANDB = "lockstep_gpt.run.loggers.wandb_run.WandbRun"
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def refuse_unusable(config: Config, placement: Placement) -> None:
    """Raise a `UserError` for a value that would fail on this machine."""
    _refuse_unknown_threads()
    if placement.world_size > 1:
        refuse_absent_interface(GLOO, os.environ.get(GLOO, ""))
        if placement.accelerator == "cuda":
            refuse_absent_interface(NCCL, os.environ.get(NCCL, ""))
    for logger in config.logger.values():
        if logger["_target_"] == WANDB and logger.get("mode") == "auto":
            check_choice("WANDB_MODE", os.environ.get("WANDB_MODE") or "online", WANDB_MODES)


def _refuse_unknown_threads() -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    counts = [count.strip() for count in threads.split(",")]
    are_counts = all(re.fullmatch(r"0*[1-9]\d*", count) for count in counts)
    rule = "must be a whole number above 0; set it to the threads of a rank, or: unset"
    check("OMP_NUM_THREADS", threads, not threads or are_counts, f"{rule} OMP_NUM_THREADS")


def refuse_absent_interface(variable: str, names: str) -> None:
    """Raise a `UserError` if a variable of gloo or NCCL names interfaces that aren't there.

    gloo needs each of its names, exactly. NCCL needs one, and takes beginnings of names; after `=`
    whole names; after `^` those to leave out, which may be absent.
    """
    if not names or (variable == NCCL and names.startswith("^")):
        return
    present = {name for _, name in socket.if_nameindex()}
    # `eth0:1` is a second address of eth0 to gloo; to NCCL, a port follows the colon.
    wanted = [name.partition(":")[0] for name in names.removeprefix("=").split(",")]
    if variable == GLOO:
        are_present = present.issuperset(wanted)
    elif names.startswith("="):
        are_present = not present.isdisjoint(wanted)
    else:
        are_present = any(name.startswith(tuple(wanted)) for name in present)
    rule = (
        f"is not a network interface of this machine, which has {', '.join(sorted(present))}; set "
        f"one of them, or: unset {variable}"
    )
    check(variable, names, are_present, rule)
