"""Shared by the programs that measure parts: the device, a clock that waits for it, and rows."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DRY = bool(os.environ["FIRST_HOUR_DRY"])
DEVICE = "cpu" if DRY else "cuda"
if DRY:  # traces graphs, but generates no code from them: a C++ compiler takes half a minute
    vars(torch)["compile"] = functools.partial(torch.compile, backend="aot_eager")


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any]) -> float:
    """Return how long `work` takes, with what it starts on the device."""
    synchronize()
    begun = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begun


def milliseconds(work: Callable[[], Any], repeats: int = 15, warmup: int = 4) -> float:
    """Return the median time of `work`."""
    if DRY:
        repeats = 2
        warmup = 1
    for _ in range(warmup):
        work()
    return statistics.median(seconds_of(work) for _ in range(repeats)) * 1e3


def show(name: str, result: str) -> None:
    """Print a row of the report."""
    print(f"row | {name} | {result}", flush=True)
