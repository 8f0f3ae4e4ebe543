"""The speed of this rank alone, and which ranks slow the others down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import torch
from omegaconf import DictConfig

from lockstep.building import build
from lockstep.cluster.report import Finding, failure, named, ok, warning
from lockstep.errors import UserError
from lockstep.plan.counting import AUTOCAST, step
from lockstep.plan.experiment import training_of, with_node, with_values
from lockstep.settings import precision_of
from lockstep.strategies.matrix_products import choose_matrix_products

GB = 1e9
SIDE = {"cpu": 768, "cuda": 8192}  # of square matrices, large enough to reach the peak
COPIED = {"cpu": 64 * 2**20, "cuda": 2**30}  # bytes, larger than caches
STEP_FLOPS = {"cpu": 3e9, "cuda": 2e13}  # of the trial step, so that it takes only a moment
SLOW, ILL = 0.8, 0.33  # fractions of the median: worth a look, unfit for training


@dataclass(frozen=True)
class Speed:
    """The speed of one rank's device, measured while all others measure too."""

    compute: float  # FLOP/s of a matrix product in the run's precision
    memory: float  # bytes read and written per second
    host: float  # bytes per second from the host's memory to the device
    utilisation: float | None  # fraction of `compute` that a forward and backward reaches


def measure(
    config: DictConfig,
    device: torch.device,
    vocab_size: int | None,
    together: Callable[[], None],
) -> Speed:
    """Measure this rank's device under the precision of `config`.

    Args:
        config: the run's settings.
        device: this rank's device.
        vocab_size: V; None: the run is not of the GPT, so no step of its model is timed.
        together: waits for all ranks. It is called before each part, so that ranks that share a
            memory find it as busy as in training.
    """
    usual = torch.get_float32_matmul_precision()
    choose_matrix_products(device.type)  # the mode that training uses
    try:
        together()
        compute = _product(precision_of(config), device)
        together()
        memory = _copy(device)
        together()
        share = _utilisation(config, device, vocab_size, compute)
        return Speed(compute, memory, _host(device), share)
    finally:
        torch.set_float32_matmul_precision(usual)


def _product(precision: str, device: torch.device) -> float:
    form = {"64-true": torch.float64}.get(precision, AUTOCAST.get(precision, torch.float32))
    side = SIDE[device.type]
    left = torch.randn(side, side, device=device).to(form)
    return 2 * side**3 / best_seconds(lambda: left @ left, device)


def _copy(device: torch.device) -> float:
    source = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)


def _host(device: torch.device) -> float:
    source = torch.zeros(COPIED["cpu"] // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return source.nbytes / best_seconds(lambda: target.copy_(source), device)


def best_seconds(work: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Return the shortest time of `work`, after a warmup run that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _utilisation(
    config: DictConfig, device: torch.device, vocab_size: int | None, compute: float
) -> float | None:
    """Time forward and backward of the configured model, cut to a depth that takes only a moment.

    Returns:
        The step's FLOP/s as a fraction of `compute`; None if one sample of this depth is too much,
        or if the run's model has no depth to cut, or parts that can't be counted.
    """
    if vocab_size is None or "n_layer" not in config.model:
        return None
    shape = with_values(config.model, n_layer=min(2, config.model.n_layer), dropout=0.0)
    try:
        trained = training_of(with_node(config, "model", shape), vocab_size)
        flops = trained.flops
    except UserError:
        return None
    micro_size = math.floor(STEP_FLOPS[device.type] / flops)
    if micro_size < 1:
        return None
    sizes = (config.batch.get(name) for name in ("micro_size", "global_size"))
    micro_size = min(micro_size, next(filter(None, sizes), 1))
    with torch.device(device):
        model = build(shape, vocab_size=vocab_size)
        tokens = torch.zeros(micro_size, config.data.block_size, dtype=torch.int64)
    if config.precision == "64-true":
        model = model.double()
    batch = tokens, tokens

    def work() -> None:
        step(model, batch, trained.loss, config.precision)

    return micro_size * flops / best_seconds(work, device, repeats=3) / compute


def table(speeds: Sequence[Speed], hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each rank, in order, with its speeds and their fraction of the median."""
    compute, memory = _medians(speeds)
    return [
        {
            "rank": rank,
            "host": host,
            "GFLOP/s": speed.compute / GB,
            "of median": speed.compute / compute,
            "memory GB/s": speed.memory / GB,
            "of median ": speed.memory / memory,
        }
        for rank, (speed, host) in enumerate(zip(speeds, hosts, strict=True))
    ]


def _medians(speeds: Sequence[Speed]) -> tuple[float, float]:
    """Return the medians of both speeds; of an even number of ranks, the higher middle value."""
    return (
        median_high([speed.compute for speed in speeds]),
        median_high([speed.memory for speed in speeds]),
    )


def stragglers(speeds: Sequence[Speed]) -> list[Finding]:
    """Report the ranks that are slower than the median, since all ranks wait for the slowest."""
    compute, memory = _medians(speeds)
    return [
        _straggler("compute", [speed.compute / compute for speed in speeds], ILL),
        _straggler("memory", [speed.memory / memory for speed in speeds], 0.0),
    ]


def _straggler(what: str, shares: Sequence[float], ill: float) -> Finding:
    """Check the ranks' fractions of the median; a fraction below `ill` is a failure."""
    slow = [rank for rank, share in enumerate(shares) if share < SLOW]
    if not slow:
        return ok(f"{what} speed", f"the slowest rank has {min(shares):.0%} of the median")
    worst = min(slow, key=lambda rank: shares[rank])
    which = f", rank {worst}" if len(slow) > 1 else ""
    line = f"{named(slow)} too slow{which} at {shares[worst]:.0%} of the median"
    fix = "check it for other programs, heat, a power limit, or another build; or remove it"
    if shares[worst] < ill:
        return failure(f"{what} speed", line, fix)
    return warning(f"{what} speed", line, fix)
