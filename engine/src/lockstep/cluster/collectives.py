"""Check the results and the speed of the collectives that training uses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lockstep.cluster.report import Finding, failure, ok, warning
from lockstep.cluster.speed import GB, best_seconds
from lockstep.ranks.ranks import Ranks

SIZES = {  # message sizes in bytes
    "cpu": (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20),
    "cuda": (4 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20, 512 * 2**20),
}
POOR = 0.5  # fraction of a link's expected bandwidth; anything below it is a problem
ELEMENTS = 1000
# Newer versions of torch use the first name, and warn about the second.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TRIAL_CLASSES, TRIAL_WIDTH = 64, 32  # of a small network
TRIAL_SAMPLES, TRIAL_LENGTH = 2, 16  # per rank
# For float64 gradients, some as large as 0.1. A different order of summation changes them by about
# 1e-16; different kernels on different CPUs change them by about 1e-8.
TOLERANCE = 1e-6


def examine_results(ranks: Ranks, device: torch.device) -> list[Finding]:
    """Check that the collectives that training uses return exactly the right values."""
    world = ranks.world_size
    mine = torch.arange(ELEMENTS, dtype=torch.float64, device=device) * (ranks.rank + 1)
    added = mine.clone()
    dist.all_reduce(added)
    sent = mine.clone()
    dist.broadcast(sent, src=0)
    gathered = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(gathered, mine)
    own = torch.arange(ELEMENTS * world, dtype=torch.float64, device=device).view(world, -1)
    own = own + ranks.rank  # one row for each rank
    exchanged = torch.empty_like(own)
    dist.all_to_all_single(exchanged, own)
    one = torch.arange(ELEMENTS, dtype=torch.float64, device=device)
    row = one + ELEMENTS * ranks.rank  # of rank 0 for this one
    expected = {
        "all-reduce": (added, one * (world * (world + 1) // 2)),
        "broadcast": (sent, one),
        "all-gather": (torch.stack(gathered), torch.stack([one * (r + 1) for r in range(world)])),
        "all-to-all": (exchanged, torch.stack([row + r for r in range(world)])),
    }
    if dist.get_backend() != "mpi":  # which does not have it, so fsdp2 does not run there
        scattered = torch.empty_like(one)
        REDUCE_SCATTER(scattered, own.flatten())
        expected["reduce-scatter"] = (scattered, row * world + world * (world - 1) // 2)
    wrong = [name for name, (got, right) in expected.items() if not torch.equal(got, right)]
    if wrong:
        fix = "update driver and NCCL, or try NCCL_P2P_DISABLE=1 to see whether P2P is at fault"
        return [failure("collectives", f"{', '.join(wrong)} gave a wrong result", fix)]
    return [ok("collectives", f"{', '.join(expected)} are exact over {dist.get_backend()}")]


def examine_step(ranks: Ranks, device: torch.device) -> list[Finding]:
    """Compare the gradients that DDP averages with those of one batch of all ranks' samples."""
    torch.manual_seed(0)
    model = _trial_model().double().to(device)
    size = (TRIAL_SAMPLES * ranks.world_size, TRIAL_LENGTH)
    classes = torch.randint(TRIAL_CLASSES, size, generator=torch.Generator().manual_seed(0))
    classes = classes.to(device)
    torch.autograd.backward(_trial_loss(model, classes))
    joined = [_gradient(weight) for weight in model.parameters()]
    model.zero_grad()
    share = classes[ranks.rank * TRIAL_SAMPLES :][:TRIAL_SAMPLES]
    ids = [device.index] if device.type == "cuda" else None
    averaging = DistributedDataParallel(model, device_ids=ids)
    torch.autograd.backward(_trial_loss(averaging, share))
    pairs = zip(joined, model.parameters(), strict=True)
    error = max(float((_gradient(weight) - expected).abs().max()) for expected, weight in pairs)
    line = f"averaged gradients differ from the whole batch's by at most {error:.1e}"
    if error <= TOLERANCE:
        return [ok("ddp step", line)]
    return [failure("ddp step", line, "do not train here: update driver, NCCL and torch")]


def _trial_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(TRIAL_CLASSES, TRIAL_WIDTH),
        nn.LayerNorm(TRIAL_WIDTH),
        nn.Linear(TRIAL_WIDTH, 4 * TRIAL_WIDTH),
        nn.GELU(),
        nn.Linear(4 * TRIAL_WIDTH, TRIAL_CLASSES),
    )


def _trial_loss(model: nn.Module, classes: Tensor) -> Tensor:
    """Return the mean cross-entropy of each class in the place of its mirror image."""
    logits = model(classes)  # (B, T, classes)
    return functional.cross_entropy(logits.flatten(0, 1), classes.flip(1).flatten())


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad.clone()


@dataclass(frozen=True)
class Bandwidth:
    """All-reduce times over one kind of link, by message size."""

    link: str  # within a node, between nodes
    ranks: int
    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]

    def bus(self, index: int) -> float:
        """Return the bandwidth that the link itself reached, in bytes per second.

        An all-reduce moves 2 (N - 1) / N of the message over each link (the "bus bandwidth" of
        NVIDIA's nccl-tests, doc/PERFORMANCE.md).
        """
        factor = 2 * (self.ranks - 1) / self.ranks
        return factor * self.sizes[index] / self.seconds[index]

    @property
    def best(self) -> float:
        """The highest bus bandwidth over all sizes, in bytes per second."""
        return max(map(self.bus, range(len(self.sizes))))

    @property
    def latency(self) -> float:
        """Seconds of one ring step, measured with the smallest message."""
        return self.seconds[0] / (2 * (self.ranks - 1))


def measure(link: str, group: Any, device: torch.device) -> Bandwidth:
    """Time all-reduces of several sizes in `group`; all its ranks must call this."""
    sizes = SIZES[device.type]
    seconds = []
    for size in sizes:
        buffer = torch.zeros(size // 4, device=device)
        times = best_seconds(lambda: dist.all_reduce(buffer, group=group), device, repeats=4)  # noqa: B023
        slowest = torch.tensor([times], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        seconds.append(float(slowest))
    return Bandwidth(link, dist.get_world_size(group), sizes, tuple(seconds))


def links(ranks: Ranks, seconds: float) -> dict[str, Any]:
    """Return this rank's groups to measure: its own node, and its peers on other nodes.

    Args:
        ranks: this process's place.
        seconds: the longest wait for another rank.
    """
    timeout = timedelta(seconds=seconds)
    local = ranks.local_world_size
    nodes = ranks.num_nodes
    if nodes == 1:
        return {"within a node": dist.group.WORLD}
    if local == 1:
        return {"between nodes": dist.group.WORLD}
    groups = {}
    for node in range(nodes):
        members = list(range(node * local, (node + 1) * local))
        group = dist.new_group(members, timeout=timeout)
        if ranks.rank in members:
            groups["within a node"] = group
    for place in range(local):
        members = list(range(place, ranks.world_size, local))
        group = dist.new_group(members, timeout=timeout)
        if ranks.rank in members:
            groups["between nodes"] = group
    return groups


def slowest(measured: Sequence[Sequence[Bandwidth]]) -> list[Bandwidth]:
    """Return the slowest measurement of each link over all ranks."""
    slowest_links: dict[str, Bandwidth] = {}
    for link in itertools.chain.from_iterable(measured):
        previous = slowest_links.setdefault(link.link, link)
        seconds = tuple(map(max, link.seconds, previous.seconds))
        slowest_links[link.link] = replace(previous, seconds=seconds)
    return list(slowest_links.values())


def table(measured: Sequence[Bandwidth]) -> list[dict[str, Any]]:
    """Return one row for each link and size."""
    return [
        {
            "link": link.link,
            "ranks": link.ranks,
            "message": f"{size / 2**10:,.0f} KiB",
            "ms": seconds * 1e3,
            "GB/s": link.bus(index) / GB,
        }
        for link in measured
        for index, (size, seconds) in enumerate(zip(link.sizes, link.seconds, strict=True))
    ]


def examine_bandwidth(
    measured: Sequence[Bandwidth], expected: Mapping[str, float | None]
) -> list[Finding]:
    """Compare each link's bandwidth with the expected one (bytes per second), if it is known."""
    findings = []
    for link in measured:
        line = f"{link.link} {link.best / GB:.3g} GB/s, {link.latency * 1e6:.3g} us a step"
        should = expected.get(link.link)
        if should is None:
            findings.append(ok("bandwidth", f"{line} (no expected value is known)"))
        elif link.best < POOR * should:
            fix = "check topology, the path (see NCCL_DEBUG=INFO), and the link's errors"
            findings.append(warning("bandwidth", f"{line}, expected {should / GB:.3g} GB/s", fix))
        else:
            findings.append(ok("bandwidth", f"{line}, expected {should / GB:.3g} GB/s"))
    return findings
