"""How fast batches come from a large map of tokens: our way, compared with torch's own way.

usage: python lab/benchmarks/feeding.py [--tokens 1_000_000_000] [--rounds 5] [--json FILE]

Micro-batches of 16 x 1024 tokens in random windows, interleaved in one process; medians. `ours` is
where training takes its batches from; `inline` is the same without the thread; `stock` is a
DataLoader over a Dataset with batched `__getitems__`, a RandomSampler, and default collation, with
one position per window like ours. All read the same warm map: each page has been touched, as after
an epoch. Memory is what the process uses in addition to the map.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lockstep.loading.loaders import Batches, Workers
from lockstep.loading.order import RankOrder, Shuffled
from lockstep.loading.permutation import permute
from lockstep.loading.reading import BatchReader
from lockstep.tokens.prepare import prepare
from lockstep.tokens.sources.pretokenized import RandomTokens
from lockstep.tokens.windows import StreamWindows
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

B, T = 16, 1024


class Stock(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The usual code: a window is two tensors, and a batch of windows is requested at once."""

    def __init__(self, windows: StreamWindows) -> None:
        self.windows = windows.view[::T]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(self.windows[row].astype(np.int64))
        return window[:-1], window[1:]

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self[row] for row in rows]


def main() -> None:
    """Measure, and print one table."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        data = RandomTokens(root=root, tokens=options.tokens, val_fraction=0.001)
        folder = prepare(data)
        first = _first_batch(folder)
        windows = _warm(folder)
        held = _own_memory()
        seconds = _measured(windows, options.rounds, options.batches)
        grown = _own_memory() - held
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{options.tokens:,} tokens, {B} x {T}, median of {options.rounds} rounds")
    for name, median in medians.items():
        print(
            f"  {name:<8}{median * 1e3:8.3f} ms per batch  {medians['stock'] / median:6.1f} x stock"
        )
    print(f"  first batch after {first:.3f} s, memory next to the map +{grown / 2**20:.1f} MiB")
    index = _permutation_seconds()
    print(f"  a window's place among 10^12: {index * 1e6:.3f} us")
    result = {"seconds": seconds, "first": first, "memory": grown, "permutation": index}
    if options.json:
        options.json.write_text(json.dumps({"tokens": options.tokens, **result}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=300, help="in a round")
    parser.add_argument("--folder", type=Path, help="where the tokens go (default: the system's)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _warm(folder: Path) -> StreamWindows:
    """Read every page of the one map of all windows; return the windows."""
    windows = StreamWindows(folder, "train", T)
    view = windows.view[::T]
    view[:, :: mmap.PAGESIZE // view.itemsize].max()
    return windows


def _places(windows: StreamWindows, first: int = 0) -> RankOrder:
    return RankOrder(Shuffled(len(windows), 0), B, 0, 1, start=first * B)


def _batches(windows: StreamWindows, workers: Workers, first: int = 0) -> Iterator[Any]:
    reader = BatchReader(windows, 0, windows.collate)
    device = SingleDeviceStrategy(torch.device("cpu"))
    return Batches(reader, device, workers).of(_places(windows, first))


def _stock(windows: StreamWindows) -> Iterator[Any]:
    data = Stock(windows)
    sampler = BatchSampler(RandomSampler(data, replacement=True), B, drop_last=True)
    return iter(DataLoader(data, batch_sampler=sampler))


def _first_batch(folder: Path) -> float:
    started = time.perf_counter()
    windows = StreamWindows(folder, "train", T)
    windows.widen(next(_batches(windows, "thread")))
    return time.perf_counter() - started


def _measured(windows: StreamWindows, rounds: int, batches: int) -> dict[str, list[float]]:
    sources: dict[str, Iterator[Any]] = {
        "ours": map(windows.widen, _batches(windows, "thread")),
        "inline": map(windows.widen, _batches(windows, 0, first=10_000)),
        "stock": _stock(windows),
    }
    for source in sources.values():
        _timed(source, 20)
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(rounds):
        names = [*sources][turn % 3 :] + [*sources][
            : turn % 3
        ]  # each is first in one of three rounds
        for name in names:
            seconds[name].append(_timed(sources[name], batches) / batches)
    return seconds


def _timed(source: Iterable[Any], batches: int) -> float:
    started = time.perf_counter()
    for _ in islice(source, batches):
        pass
    return time.perf_counter() - started


def _own_memory() -> int:
    """Return the bytes of this process that are not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kilobytes) << 10


def _permutation_seconds() -> float:
    indices = np.arange(1 << 16)
    samples = []
    for epoch in range(9):
        started = time.perf_counter()
        permute(indices, 10**12, 0, epoch)
        samples.append((time.perf_counter() - started) / indices.size)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
