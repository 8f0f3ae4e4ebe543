"""Tasks of plain `srun` as ranks: torchrun's variables from SLURM's own."""

import os
import re
import socket

from lockstep.errors import UserError
from lockstep.launch.launch_settings import LaunchSettings

# Rank 0 listens at one of these ports, by job and step.
FIRST_PORT = 20_000
PORTS = 20_000


def become_rank(settings: LaunchSettings) -> None:
    """Set this task's rank in the environment, if it is one of several of one `srun`.

    Nothing changes if the launcher has set it already, or if each task starts the ranks of its
    machine (`launch.rdzv_endpoint`).
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "RANK" not in os.environ and settings.rdzv_endpoint is None:
        os.environ.update(rank_variables())


def rank_variables() -> dict[str, str]:
    """Return what torchrun would set for this task, or raise a `UserError`."""
    read = os.environ.__getitem__
    per_node = tasks_per_node(read("SLURM_STEP_TASKS_PER_NODE"))
    if len(set(per_node)) > 1:
        raise UserError(
            f"srun started {', '.join(map(str, per_node))} tasks on its machines; start equally "
            "many on each with --ntasks-per-node"
        )
    job = int(read("SLURM_JOB_ID"))
    step = int(read("SLURM_STEP_ID"))
    return {
        "RANK": read("SLURM_PROCID"),
        "LOCAL_RANK": read("SLURM_LOCALID"),
        "WORLD_SIZE": read("SLURM_STEP_NUM_TASKS"),
        "LOCAL_WORLD_SIZE": str(per_node[0]),
        "MASTER_ADDR": first_host(read("SLURM_STEP_NODELIST"), len(per_node)),
        "MASTER_PORT": str(FIRST_PORT + (100 * job + step) % PORTS),
    }


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each machine, from SLURM's short form such as `2(x3),1`."""
    counts: list[int] = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeated or 1)
    return counts


def first_host(nodes: str, count: int) -> str:
    """Return the first of SLURM's list of nodes, such as `gpu[07-09,12],cpu1`."""
    if count == 1:
        return "127.0.0.1"
    prefix, numbers = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes).groups()  # type: ignore[union-attr]
    host = prefix + (numbers or "")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UserError(
            f"srun's first machine {host} cannot be resolved ({error.strerror or error}); set "
            "MASTER_ADDR, MASTER_PORT, RANK, and WORLD_SIZE"
        ) from None
    return str(host)
