"""The numbers of ranks and machines that a launcher has started, read from its environment."""

import os

from lockstep_gpt.config import check, counted


def as_launched(devices: int | str, nodes: int) -> tuple[int, int]:
    """Return devices per machine and machines; reject settings that do not match the launcher."""
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    launched = world_size // local_world_size
    here = f"but the launcher started {counted(local_world_size, 'rank')} on this machine"
    rule = f"{here}; remove the setting, or start {devices}"
    check("trainer.devices", devices, devices in ("auto", local_world_size), rule)
    rule = f"but the launcher started {launched}; remove the setting"
    check("trainer.num_nodes", nodes, nodes in (1, launched), rule)
    return local_world_size, launched
