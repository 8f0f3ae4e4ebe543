"""The six collectives as tables: what each rank has before and after.

python lab/ladder/collectives.py [--ranks 4] [--backend gloo]

Each one really runs. All communication in parallel training is built from these.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

Table = list[list[float]]  # by rank
Collective = Callable[[Tensor], Tensor]  # from what a rank has to what it gets


def broadcast(held: Tensor) -> Tensor:
    """Every rank gets rank 0's tensor. DDP does this to the weights, once."""
    dist.broadcast(held, src=0)
    return held


def all_reduce(held: Tensor) -> Tensor:
    """Every rank gets the sum. DDP does this to the gradients, each step."""
    dist.all_reduce(held)
    return held


def scatter(held: Tensor) -> Tensor:
    """Rank 0 sends each rank one part."""
    part = torch.empty_like(held[:1])
    dist.scatter(part, list(held.split(1)) if dist.get_rank() == 0 else None, src=0)
    return part


def gather(held: Tensor) -> Tensor:
    """Rank 0 gets the parts of all ranks."""
    parts = [torch.empty_like(held) for _ in range(dist.get_world_size())]
    dist.gather(held, parts if dist.get_rank() == 0 else None, dst=0)
    return torch.cat(parts) if dist.get_rank() == 0 else held[:0]


def reduce_scatter(held: Tensor) -> Tensor:
    """Each rank gets its part of the sum. FSDP does this to the gradients."""
    part = torch.empty_like(held[:1])
    dist.reduce_scatter(part, list(held.split(1)))
    return part


def all_gather(held: Tensor) -> Tensor:
    """Every rank gets all parts. FSDP does this to the weights, before each layer."""
    parts = [torch.empty_like(held) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, held)
    return torch.cat(parts)


COLLECTIVES: tuple[Collective, ...] = (
    broadcast,
    all_reduce,
    scatter,
    gather,
    reduce_scatter,
    all_gather,
)
ONE_EACH = (gather, all_gather)  # one number per rank; the others use one per pair of ranks


def be_rank(rank: int, ranks: int, backend: str, folder: Path) -> None:
    """Run every collective as one rank; save the tensors before and after in `folder`."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    tensors = []
    for collective in COLLECTIVES:
        count = 1 if collective in ONE_EACH else ranks
        held = 10.0 * rank + torch.arange(count, device=device)
        before = held.tolist()
        tensors.append((before, collective(held).tolist()))
    torch.save(tensors, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run(ranks: int, backend: str) -> list[tuple[Table, Table]]:
    """Start the ranks; return their tensors before and after each collective."""
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.spawn(be_rank, (ranks, backend, folder), ranks)
        by_rank = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return [tuple(map(list, zip(*pairs, strict=True))) for pairs in zip(*by_rank, strict=True)]


def as_text(collective: Collective, before: Table, after: Table) -> str:
    """Format one table."""
    held = [_numbers(numbers) for numbers in before]
    width = max(map(len, held))
    rows = [
        f"  rank {rank}  {start:{width}}  ->  {_numbers(got)}".rstrip()
        for rank, (start, got) in enumerate(zip(held, after, strict=True))
    ]
    return "\n".join([f"{collective.__name__}: {collective.__doc__}", *rows])


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:3.0f}" for value in values)


def main() -> None:
    """Read the command line, run the collectives, and print the tables."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    options = flags.parse_args()
    if options.ranks < 1:
        flags.error(f"--ranks {options.ranks} must be at least 1")
    tables = run(options.ranks, options.backend)
    for collective, (before, after) in zip(COLLECTIVES, tables, strict=True):
        print(as_text(collective, before, after), end="\n\n")


if __name__ == "__main__":
    main()
