"""How fast `train_loader` reads any dataset, compared with torch's DataLoader.

usage: python lab/benchmarks/loaders.py [--rounds 7] [--json FILE]

Each row is a size of samples, a number of worker processes, and whether samples draw random numbers
(then ours seeds each). Both read the same dataset in random order, in turns, in one process; the
ratio is that of the medians of batches per second: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import lightning
import torch
from lockstep.loading.loaders import train_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

KINDS = {"1 KB": (256, 64, 400), "200 KB": (51_200, 16, 100)}  # numbers, micro-batch, batches
SAMPLES = 20_000


class Samples(Dataset[Tensor]):
    """Vectors of a table, with noise if wanted."""

    def __init__(self, numbers: int, draws: bool) -> None:
        self.table = torch.randn(min(SAMPLES, 200_000_000 // numbers // 4), numbers)
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        row = self.table[number % len(self.table)]
        return row + torch.rand(len(row)) if self.draws else row.clone()


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print("samples  workers  random   ours/torch (least to most)      ours       torch")
    for size in KINDS:
        for workers in (0, 2):
            for draws in (False, True):
                ratios, ours, torchs = measured(size, workers, draws, options.rounds)
                ratio = statistics.median(ratios)
                rows[f"{size}, {workers}, {draws}"] = ratio
                print(
                    f"{size:<9}{workers:<9}{draws!s:<9}{ratio:.3f} ({min(ratios):.2f} to "
                    f"{max(ratios):.2f}){ours:16,.0f}{torchs:12,.0f} batches/s",
                    flush=True,
                )
    print(f"first batch of 10^9 samples after {first_of_many():.4f} s")
    if options.json:
        options.json.write_text(json.dumps(rows))


def measured(size: str, workers: int, draws: bool, rounds: int) -> tuple[list[float], float, float]:
    """Return the ratio of each round, and the median speeds in batches per second."""
    numbers, micro_size, batches = KINDS[size]
    dataset = Samples(numbers, draws)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    ours = train_loader(dataset, micro_size, trainer, seed=0, workers=workers, endless=True)
    stock: DataLoader[Tensor] = DataLoader(
        dataset,
        micro_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )
    streams: list[Iterator[Any]] = [iter(ours), (batch for _ in cycle([0]) for batch in stock)]
    for stream in streams:
        timed(stream, batches // 4)
    speeds: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            speeds[which].append(batches / timed(streams[which], batches))
    ratios = [ours / torchs for ours, torchs in zip(*speeds, strict=True)]
    return ratios, *map(statistics.median, speeds)


def timed(stream: Iterator[Any], batches: int) -> float:
    """Return the seconds of so many batches."""
    started = time.perf_counter()
    for _ in islice(stream, batches):
        pass
    return time.perf_counter() - started


def first_of_many() -> float:
    """Return the seconds from the call to the first batch of a dataset of 10^9 samples."""
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    started = time.perf_counter()
    next(iter(train_loader(range(10**9), 64, trainer, seed=0)))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
