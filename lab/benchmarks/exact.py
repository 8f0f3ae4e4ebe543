"""The cost of equal bits: steps that add gradients in the tree's order, compared with torch's.

usage: python lab/benchmarks/exact.py [--models S,M] [--steps 30]

Both kinds alternate, step by step, in the same processes with one thread each: GPT-2 in shapes of
lab/benchmark.py, K micro-batches, AdamW. The table has medians, and the median ratio of
neighboring steps. `split` is the cost of K micro-batches on one rank, relative to one whole batch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark_task import MODELS
from lockstep.strategies.exact_sums import ExactSums
from torch.nn.parallel import DistributedDataParallel

from lockstep_gpt.gpt import GPT

CASES = ((1, 2), (1, 4), (2, 2), (2, 4), (4, 4))  # ranks, K


class Loop:
    """One rank's steps on its own model; gradients are added in the tree's order or as in torch."""

    def __init__(self, model: str, ranks: int, leaves: int, exact: bool) -> None:
        shape = MODELS[model]
        torch.manual_seed(0)
        names = {name: shape[name] for name in ("n_layer", "n_head", "n_embd")}
        gpt = GPT(shape["vocab"], block_size=shape["T"], **names)
        self.model: Any = gpt
        if ranks > 1:
            self.model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, fused=True)
        self.accumulation = leaves // ranks
        self.batch = torch.randint(shape["vocab"], (shape["B"] // leaves, shape["T"] + 1))
        self.sums: ExactSums | None = None
        self.factor = 1.0
        if exact:
            self.sums = ExactSums(gpt, ranks, torch.device("cpu"), in_ddp=ranks > 1)
            self.factor = self.sums.factor(self.accumulation)
            if ranks > 1:
                self.model.register_comm_hook(None, self.sums.exchange)

    def step(self) -> float:
        """Run one update; return its seconds."""
        started = time.perf_counter()
        for leaf in range(self.accumulation):
            is_last = leaf == self.accumulation - 1
            waits = not is_last and hasattr(self.model, "no_sync")
            with self.model.no_sync() if waits else contextlib.nullcontext():
                loss = self.model(self.batch[:, :-1], self.batch[:, 1:])
                (loss / self.accumulation * self.factor).backward()
            if self.sums:
                self.sums.add(is_last)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def main() -> None:
    """Print a line per case: the medians of both kinds, and of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="S,M", help="of lab/benchmark.py (default: S,M)")
    parser.add_argument("--steps", type=int, default=30, help="of each kind (default: 30)")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    print(f"{'':26}{'in order':>9}{'torch':>9}{'ratio':>8}   ms, medians of {options.steps}")
    for model in options.models.split(","):
        for ranks, leaves in CASES:
            with socket.create_server(("127.0.0.1", 0)) as free:
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
            mp.spawn(rank_main, (ranks, model, leaves, options.steps), nprocs=ranks)


def rank_main(rank: int, ranks: int, model: str, leaves: int, steps: int) -> None:
    """Run the cases for one number of ranks; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    compare(f"{model}, {ranks} ranks, K = {leaves}", rank, steps, [
        Loop(model, ranks, leaves, exact) for exact in (True, False)
    ])  # fmt: skip
    if ranks == 1:
        name = f"{model}, split in {leaves}"
        compare(name, rank, steps, [Loop(model, 1, count, False) for count in (leaves, 1)])
    dist.destroy_process_group()


def compare(name: str, rank: int, steps: int, loops: list[Loop]) -> None:
    """Time two loops that alternate."""
    for loop in loops * 3:  # one-time work
        loop.step()
    pairs = []
    for number in range(steps):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {index: loops[index].step() for index in order}
        pairs.append((seconds[0], seconds[1]))
    if rank == 0:
        in_order, in_torch = (
            1e3 * statistics.median(column) for column in zip(*pairs, strict=True)
        )
        ratio = statistics.median(first / second for first, second in pairs)
        print(f"{name:26}{in_order:9.2f}{in_torch:9.2f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
