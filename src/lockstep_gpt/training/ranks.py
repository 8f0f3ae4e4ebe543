"""Who this rank is, and what ranks tell each other outside of training."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep_gpt.config import Config


@dataclass(frozen=True)
class Ranks:
    """This process among all, as the launcher's environment says (torchrun's variables)."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and `LOCAL_WORLD_SIZE`; alone without them."""
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
        """Machines; a world that shrank by one has fewer than the configuration says."""
        return self.world_size // self.local_world_size


LOST_PEER_MESSAGES = re.compile(
    r"Connection (closed|reset) by peer|Socket closed|Timed out waiting|Broken pipe|NCCL"
)


def lost_peers(error: BaseException) -> bool:
    """Tell whether `error` only says that another rank went away, as far as torch tells."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(LOST_PEER_MESSAGES.search(str(error)))


def backend_of(config: Config) -> str:
    """Return the process group's backend: as set, else nccl for GPUs and gloo for the rest."""
    default = "nccl" if config.trainer["accelerator"] == "cuda" else "gloo"
    return str(config.strategy.get("process_group_backend") or default)


def join(ranks: Ranks, config: Config) -> None:
    """Connect to the other ranks, if there are any, before Lightning would.

    So that ranks can agree on things (which checkpoint to resume from) before the Trainer runs.
    """
    if ranks.world_size == 1 or dist.is_initialized():
        return
    backend = backend_of(config)
    if backend == "nccl":
        torch.cuda.set_device(ranks.local_rank)
    timeout = timedelta(seconds=config.strategy.get("timeout_seconds", 1800))
    dist.init_process_group(backend, timeout=timeout)


def leave() -> None:
    """Disconnect in good order, after a run that went well."""
    if dist.is_initialized():
        dist.destroy_process_group()


def from_rank_zero(text: str) -> str:
    """Return rank 0's `text` on every rank."""
    return _from_rank(0, text) if dist.is_initialized() else text


def from_each_rank(text: str) -> list[str]:
    """Return every rank's `text`, by rank, on every rank."""
    if not dist.is_initialized():
        return [text]
    return [_from_rank(rank, text) for rank in range(dist.get_world_size())]


def _from_rank(source: int, text: str) -> str:
    """Broadcast UTF-8: the library's way to send objects is to pickle them."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    size = torch.tensor([len(text.encode())], device=device)
    dist.broadcast(size, src=source)
    content = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        content.copy_(torch.tensor(list(text.encode()), dtype=torch.uint8))
    if int(size):
        dist.broadcast(content, src=source)
    return bytes(content.tolist()).decode()


class StopVote:
    """Lets all ranks stop after the same step, without any of them waiting for the vote.

    A vote is an all-reduce that is started at the end of a step and read at the end of the next,
    when it has long arrived. It goes over a gloo group, so no GPU is synchronised for it.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._ballot = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def cast(self, signum: int) -> int:
        """Vote for stopping by signal `signum`, 0 for going on; return what was decided."""
        if self._group is None:
            return signum
        decided = 0
        if self._work is not None:
            self._work.wait()
            decided = int(self._ballot.item())
        self._ballot.fill_(signum)
        self._work = dist.all_reduce(
            self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return decided

    def close(self) -> None:
        """Wait for the last vote: every rank takes part in the same number of them."""
        if self._work is not None:
            self._work.wait()
