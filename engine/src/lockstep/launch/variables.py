"""Network interfaces in variables of gloo and NCCL: refuses those that this machine lacks.

Else each rank fails when it wants to connect, and ranks of other machines wait for it.
"""

import os
import socket

from lockstep.launch.placement import Placement
from lockstep.settings import check

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"


def refuse_absent_interfaces(placement: Placement) -> None:
    """Raise a `UserError` if these ranks would connect through an interface that isn't there."""
    if placement.world_size > 1:
        refuse_absent_interface(GLOO, os.environ.get(GLOO, ""))
        if placement.accelerator == "cuda":
            refuse_absent_interface(NCCL, os.environ.get(NCCL, ""))


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
