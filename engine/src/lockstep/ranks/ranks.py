"""How ranks work together: who this one is, how they connect, what they exchange."""

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.ranks.address import (
    address_towards,
    interface_of,
    is_loopback,
    loopback_interface,
)
from lockstep.ranks.store import meet
from lockstep.ranks.waiting import MeetingError
from lockstep.settings import check

# Seconds that ranks wait for another one, unless told otherwise. All groups must get the same
# limit: torch's own defaults are 10 minutes for NCCL, and 30 for gloo.
LONGEST_WAIT = 1800.0

_store: Store | None = None  # where this process has met the other ranks


@dataclass(frozen=True)
class Ranks:
    """This process among all, from the launcher's environment (torchrun's variables).

    >>> ranks = lockstep.Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4)
    >>> ranks.num_nodes
    2
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Self:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, and `LOCAL_WORLD_SIZE`; one rank without."""
        read = os.environ.get
        world_size = int(read("WORLD_SIZE", "1"))
        return cls(
            rank=int(read("RANK", "0")),
            local_rank=int(read("LOCAL_RANK", "0")),
            world_size=world_size,
            local_world_size=int(read("LOCAL_WORLD_SIZE", str(world_size))),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes; fewer than configured if the world has shrunk."""
        return self.world_size // self.local_world_size


# From gloo, then from NCCL, which has other errors too: settings, CUDA, memory.
LOST_PEER_MESSAGES = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Socket closed|Timed out waiting|Broken pipe|"
    r"Application timeout caused pair closure|connectFullMesh failed|"
    r"ncclRemoteError|collective operation timeout|NCCL communicator (was|has been) aborted"
)


def lost_peers(error: BaseException) -> bool:
    """Return whether `error` only means that another rank went away, as far as torch shows."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError | MeetingError):
        return True
    return isinstance(error, RuntimeError) and bool(LOST_PEER_MESSAGES.search(str(error)))


def backend_of(accelerator: str, chosen: str | None = None) -> str:
    """Return the process group's backend: the chosen one, else nccl for GPUs, gloo for the rest.

    Args:
        accelerator: cpu, cuda, or mps.
        chosen: a backend; None: the accelerator decides.
    """
    return chosen or ("nccl" if accelerator == "cuda" else "gloo")


def gloo_group(seconds: float, members: list[int] | None = None) -> dist.ProcessGroup:
    """Return a new group over gloo of `members`, or of all ranks; every rank must call this.

    Args:
        seconds: the longest wait for another rank.
        members: their ranks.
    """
    timeout = timedelta(seconds=seconds)
    group: Any = dist.new_group(members, backend="gloo", timeout=timeout)
    return cast(dist.ProcessGroup, group)


def backend_here() -> str:
    """Return the backend of the process group that this rank has joined."""
    return str(dist.get_backend())


def join(
    ranks: Ranks,
    store: Store | None = None,
    *,
    accelerator: str = "cpu",
    backend: str | None = None,
    timeout: float = LONGEST_WAIT,
) -> None:
    """Connect to the other ranks, if there are any, before Lightning would.

    Ranks can then agree on things (which checkpoint to resume from) before the Trainer runs.

    Args:
        ranks: this process among all.
        store: where the ranks have met; None: they meet now.
        accelerator: cpu, cuda, or mps.
        backend: of the process group; None: the accelerator decides.
        timeout: the longest wait for another rank in seconds, also later.

    Raises:
        UserError: the backend is not in this torch, or needs GPUs.
    """
    if ranks.world_size == 1 or dist.is_initialized():
        return
    rule = f"needs GPUs, but this run uses {accelerator}; set strategy.process_group_backend=gloo"
    has_gpus = accelerator == "cuda"
    check("strategy.process_group_backend", backend, has_gpus or backend != "nccl", rule)
    is_available = backend is None or dist.is_backend_available(backend)
    rule = f"is not in torch {torch.__version__}; set nccl for GPUs or gloo"
    check("strategy.process_group_backend", backend, is_available, rule)
    connect(ranks, backend_of(accelerator, backend), accelerator == "cuda", timeout, store)


def connect(
    ranks: Ranks, backend: str, has_gpu: bool, seconds: float, store: Store | None = None
) -> None:
    """Connect to the other ranks; `seconds` is the longest wait for them, also later."""
    global _store
    store = store or meet(ranks.rank, ranks.world_size, seconds)
    _store = store
    choose_interfaces(ranks, store)
    device = None
    if has_gpu:  # else it would also use memory of the first GPU
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device if backend == "nccl" else None,  # connects now, not when first used
    )


def choose_interfaces(ranks: Ranks, store: Store) -> None:
    """Choose the network interface towards the other ranks; gloo would guess one from a name.

    gloo also carries the vote to stop when gradients travel over NCCL. NCCL uses several interfaces
    to other machines, but needs to be told on a machine without any. What the user has set stays.
    """
    interface = interface_of(_address_towards_others(ranks, store))
    if not interface and ranks.num_nodes == 1:
        interface = loopback_interface()
    if interface not in {name for _, name in socket.if_nameindex()}:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ranks.num_nodes == 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else it would be a prefix


def _address_towards_others(ranks: Ranks, store: Store) -> str:
    """Return the address at which ranks of other nodes reach this one; empty if it is not IPv4.

    The node of rank 0 may know its own name as a loopback address, as Debian does (127.0.1.1).
    It then asks the route towards a rank of another node.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = _address_towards(host, port)
    if ranks.num_nodes == 1:
        return address
    store.set(f"address of rank {ranks.rank}", address)
    if address and not is_loopback(address):
        return address
    for other in range(ranks.world_size):
        theirs = store.get(f"address of rank {other}").decode()
        if theirs and not is_loopback(theirs):
            return _address_towards(theirs, port)
    return address  # all nodes are simulated on one machine


def _address_towards(host: str, port: int) -> str:
    with contextlib.suppress(OSError):  # an IPv6 address, for example
        return address_towards(host, port)
    return ""


def meeting_store() -> Store | None:
    """Return the store where this rank has met the others; None: it hasn't."""
    return _store if dist.is_initialized() else None


def leave() -> None:
    """Disconnect cleanly, after a successful run."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_restart() -> bool:
    """Return whether this rank replaces one that ended before, as agents and torchrun tell it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def is_rank_zero() -> bool:
    """Return whether this is rank 0 of the ranks that have joined, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_zero(value: Any) -> Any:
    """Return rank 0's `value` on every rank."""
    return from_each_rank(value)[0]


def from_each_rank(value: Any) -> list[Any]:
    """Return every rank's small `value`, in rank order, on every rank."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def ranks_unlike_rank_zero(digest: str) -> str:
    """Return the ranks, such as `2, 3`, whose `digest` is not rank 0's; all ranks must call it."""
    digests = from_each_rank(digest)
    return ", ".join(str(rank) for rank, other in enumerate(digests) if other != digests[0])


def tensors_of_ranks(tensor: Tensor) -> Tensor:
    """Stack the tensors of all ranks, which have one shape, in a new first dimension."""
    if not dist.is_initialized():
        return tensor[None]
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return torch.stack(tensors)
