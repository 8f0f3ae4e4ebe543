"""Shared by the programs that measure parts: the device, a clock that waits for it, and rows."""

from __future__ import annotations

import functools
import gc
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


def free_memory() -> None:
    """Give the memory of what is no longer used back to the device."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def seconds_of(work: Callable[[], Any], inner: int = 1) -> float:
    """Return how long `work` takes, with what it starts on the device: the mean of `inner` runs."""
    synchronize()
    begun = time.perf_counter()
    for _ in range(inner):
        work()
    synchronize()
    return (time.perf_counter() - begun) / inner


def milliseconds(
    work: Callable[[], Any], repeats: int = 15, warmup: int = 4, inner: int = 1
) -> float:
    """Return the median time of `work`, of means of `inner` runs."""
    if DRY:
        repeats = 2
        warmup = 1
        inner = 1
    for _ in range(warmup):
        work()
    return statistics.median(seconds_of(work, inner) for _ in range(repeats)) * 1e3


def show(name: str, result: str, status: str = "") -> None:
    """Print a row of the report; its status is that of `report.py`, by default that it is fine."""
    print(f"row {status}".rstrip() + f" | {name} | {result}", flush=True)
