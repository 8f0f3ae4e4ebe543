"""How long an optimizer step takes, by part, and what of it communication adds.

Times are seconds, sizes bytes, bandwidths bytes per second in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_gpt.extras.cluster.hardware import Hardware
from lockstep_gpt.extras.cluster.memory import States
from lockstep_gpt.training.schedule import BatchPlan

MIB = 2**20
FIRST_BUCKET = 1 * MIB  # DDP's own, so that communication starts early
BACKWARD_SHARE = 2 / 3  # of forward and backward (Kaplan et al. 2020, section 2.1)
BYTES_PER_TOKEN = 2 * 8  # the token and its target, both int64


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; `all_reduce` runs beside `compute` save what is `exposed`."""

    compute: float
    all_reduce: float
    exposed: float
    optimizer: float
    data: float

    @property
    def total(self) -> float:
        """The length of the step."""
        return self.compute + self.exposed + self.optimizer + self.data


def simple_seconds(size: float, bandwidth: float) -> float:
    """Return size over bandwidth, the rule of thumb: every byte crosses the link once."""
    return size / bandwidth


def ring_seconds(size: float, ranks: int, bandwidth: float) -> float:
    """Return the time of a ring all-reduce without its latency.

    Each rank sends and receives 2 (N - 1) / N of the buffer, whatever the order of the ring
    (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 3).
    """
    return 2 * (ranks - 1) / ranks * size / bandwidth


def all_reduce_seconds(size: float, batch: BatchPlan, hardware: Hardware) -> float:
    """Return the time to add up `size` bytes over all ranks: in each node, then between nodes.

    The order is that of Goyal et al. 2017, section 4. Latency as in Thakur et al. 2005: every
    step costs a fixed time, of which a ring has 2 (N - 1) and NCCL's double trees between nodes
    (Sanders et al. 2009) 2 log2 N.
    """
    efficiency = hardware.link_efficiency
    within = ring_seconds(size, batch.devices, hardware.intra.bandwidth * efficiency)
    within += 2 * (batch.devices - 1) * hardware.intra.latency
    node_bandwidth = hardware.adapters * hardware.inter.bandwidth * efficiency
    between = ring_seconds(size, batch.nodes, node_bandwidth)
    between += 2 * math.ceil(math.log2(batch.nodes)) * hardware.inter.latency
    return within + between


def buckets(gradients: Sequence[int], cap_mb: float) -> list[int]:
    """Return the sizes of DDP's buckets in the order in which backward fills them.

    Gradients come in the reverse order of the parameters; a bucket is closed as soon as it holds
    its limit (Li et al. 2020, "PyTorch Distributed", section 3.2.3). A tied embedding, first of
    the parameters, fills the last bucket.

    Args:
        gradients: bytes of each parameter's gradient, in the model's order.
        cap_mb: MiB of every bucket but the first.
    """
    sizes: list[int] = []
    size, limit = 0, float(FIRST_BUCKET)
    for gradient in reversed(gradients):
        size += gradient
        if size >= limit:
            sizes.append(size)
            size, limit = 0, cap_mb * MIB
    return [*sizes, size] if size else sizes


def exposed_seconds(sizes: Sequence[int], seconds: Sequence[float], backward: float) -> float:
    """Return how long communication goes on after backward has ended.

    Buckets are reduced one after the other, each as soon as it is full (Li et al. 2020); the time
    of backward is taken to spread over the buckets by their sizes.
    """
    filled, end = 0, 0.0
    for size, duration in zip(sizes, seconds, strict=True):
        filled += size
        end = max(end, backward * filled / sum(sizes)) + duration
    return max(0.0, end - backward) if any(seconds) else 0.0


def optimizer_seconds(states: States, clips: bool, bandwidth: float) -> float:
    """Return the time that memory needs for an update, which computes next to nothing.

    Weights, gradients and states are read, weights and states written; clipping reads the
    gradients for their norm, then reads and writes them.
    """
    update = 2 * (states.weights + states.optimizer) + states.gradients
    return (update + 3 * states.gradients * clips) / bandwidth


@dataclass(frozen=True)
class Work:
    """What a run asks of its devices, whatever their number."""

    flops_per_token: int
    gradients: list[int]  # bytes of each parameter's gradient, in the model's order
    states: States
    precision: str
    bucket_cap_mb: float
    compression: float  # of gradients on their way: 0.5 for half precision
    clips: bool


def step_time(work: Work, batch: BatchPlan, hardware: Hardware) -> StepTime:
    """Predict one optimizer step.

    Gradients are reduced once per step, beside the backward of the last micro-step.
    """
    tokens = batch.micro_size * batch.block_size
    speed = hardware.flops(work.precision) * hardware.utilisation
    micro_step = tokens * work.flops_per_token / speed
    sizes = buckets(work.gradients, work.bucket_cap_mb)
    seconds = [all_reduce_seconds(size * work.compression, batch, hardware) for size in sizes]
    return StepTime(
        compute=batch.accumulation * micro_step,
        all_reduce=sum(seconds),
        exposed=exposed_seconds(sizes, seconds, BACKWARD_SHARE * micro_step),
        optimizer=optimizer_seconds(work.states, work.clips, hardware.memory_bandwidth),
        data=batch.accumulation * tokens * BYTES_PER_TOKEN / hardware.host_link.bandwidth,
    )
