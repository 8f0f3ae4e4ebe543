"""Predict how long an optimizer step takes, by part, and how much communication adds.

Times are in seconds, sizes in bytes, bandwidths in bytes per second in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.batch import Batch
from lockstep.plan.hardware import Hardware, Link
from lockstep.plan.sharing import Ownership, Sharing
from lockstep.plan.training import States
from lockstep.ranks.peaks import in_form

MIB = 2**20
FIRST_BUCKET = 1 * MIB  # DDP's default, so that communication starts early
BACKWARD_SHARE = 2 / 3  # backward's part of both passes (Kaplan et al. 2020, section 2.1)
PRODUCT_SIZE = 2  # bytes per element in Muon's products: bfloat16 on GPUs


RING, TREE = "ring", "tree"


@dataclass(frozen=True)
class Grid:
    """Ranks that exchange something."""

    devices: int  # per node
    nodes: int

    @property
    def world_size(self) -> int:
        """Total ranks."""
        return self.devices * self.nodes


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; `all_reduce` overlaps with the rest, except for `exposed`."""

    compute: float
    all_reduce: float  # and Muon's matrices or updates; under fsdp2: gathers and scatters
    algorithm: str  # NCCL's, for the largest bucket; empty: nothing is exchanged
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

    Each rank sends and receives 2 (N - 1) / N of the buffer, in any order of the ring
    (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 3).
    """
    return 2 * (ranks - 1) / ranks * size / bandwidth


def bandwidth_of_all(ranks: Grid, hardware: Hardware) -> float:
    """Return the bytes per second that flow from rank to rank through all ranks.

    NCCL builds several rings or trees through all devices at once. Each enters and leaves a node
    once, through a different adapter. Data flow in small pieces, so the bottleneck decides: the
    link of a device within its node, or all adapters of a node together.
    """
    within = hardware.intra.bandwidth if ranks.devices > 1 else math.inf
    between = hardware.adapters * hardware.inter.bandwidth if ranks.nodes > 1 else math.inf
    return min(within, between) * hardware.link_efficiency


def all_reduce_seconds(size: float, ranks: Grid, hardware: Hardware) -> tuple[float, str]:
    """Return the time to all-reduce `size` bytes over all ranks, and the faster of two algorithms.

    A ring has 2 (N - 1) steps; 2 in each node lead to another node (Thakur et al. 2005). A double
    tree (Sanders et al. 2009) sends each byte twice, up and down a chain in each node and a tree of
    the nodes. NCCL chooses in the same way, with the same step counts (its src/graph/tuning.cc).
    """
    bandwidth = bandwidth_of_all(ranks, hardware)
    within = hardware.intra
    between = hardware.inter
    steps = 2 * (ranks.world_size - 1)
    crossing = min(steps, 2 * ranks.nodes) if ranks.nodes > 1 else 0
    ring = ring_seconds(size, ranks.world_size, bandwidth)
    ring += (steps - crossing) * within.latency + crossing * between.latency
    tree = 2 * size / bandwidth
    tree += 2 * (ranks.devices - 1) * _tree_latency(within)
    tree += 2 * math.ceil(math.log2(ranks.nodes)) * _tree_latency(between)
    return min((ring, RING), (tree, TREE))


def _tree_latency(link: Link) -> float:
    return link.latency if link.tree_latency is None else link.tree_latency


def gather_seconds(size: float, ranks: Grid, hardware: Hardware) -> float:
    """Return the time for a ring to all-gather or reduce-scatter `size` bytes on all ranks.

    Each is half of an all-reduce; NCCL does not have trees for them.
    """
    steps = ranks.world_size - 1
    crossing = ranks.nodes - 1
    seconds = ring_seconds(size, ranks.world_size, bandwidth_of_all(ranks, hardware)) / 2
    return seconds + (steps - crossing) * hardware.intra.latency + crossing * hardware.inter.latency


def data_ranks(batch: Batch, hardware: Hardware) -> tuple[Grid, Hardware]:
    """Return the ranks with which a rank shares the shards of its part, and the links they have.

    As many groups of them as a model has parts use a node's adapters at the same time.
    """
    size = batch.tensor_parallel
    devices = max(1, batch.devices // size)
    ranks = Grid(devices, nodes=batch.data_parallel // devices)
    link = replace(hardware.inter, bandwidth=hardware.inter.bandwidth / size)
    return ranks, replace(hardware, inter=link)


def tensor_seconds(size: float, batch: Batch, hardware: Hardware) -> float:
    """Return the time of `size` bytes of all-reduces over the ranks that split a model.

    They are long enough for latency not to count. The ranks are neighbors, on one node if it has
    enough devices.
    """
    devices = min(batch.tensor_parallel, batch.devices)
    ranks = Grid(devices, nodes=batch.tensor_parallel // devices)
    return ring_seconds(size, batch.tensor_parallel, bandwidth_of_all(ranks, hardware))


def buckets(gradients: Sequence[int], cap_mb: float) -> list[int]:
    """Return the sizes of DDP's buckets in the order in which backward fills them.

    Gradients come in the reverse order of the parameters; a bucket is closed as soon as it reaches
    its limit (Li et al. 2020, "PyTorch Distributed", section 3.2.3). A tied embedding, the first
    of the parameters, fills the last bucket.

    Args:
        gradients: bytes of each parameter's gradient, in the model's order.
        cap_mb: MiB of every bucket except the first.
    """
    sizes: list[int] = []
    size = 0
    limit = float(FIRST_BUCKET)
    for gradient in reversed(gradients):
        size += gradient
        if size >= limit:
            sizes.append(size)
            size = 0
            limit = cap_mb * MIB
    return [*sizes, size] if size else sizes


def exposed_seconds(sizes: Sequence[int], seconds: Sequence[float], backward: float) -> float:
    """Return how long communication continues after backward has ended.

    Buckets are reduced one after another, each as soon as it is full (Li et al. 2020). Backward's
    time is assumed to be spread over the buckets in proportion to their sizes.
    """
    if not any(seconds):
        return 0.0
    filled = 0  # bytes of the buckets so far
    end = 0.0
    for size, duration in zip(sizes, seconds, strict=True):
        filled += size
        end = max(end, backward * filled / sum(sizes)) + duration
    return max(0.0, end - backward)


@dataclass(frozen=True)
class Work:
    """The work of a run, for any number of devices."""

    kernels: int  # of a micro-batch's forward and backward
    flops: int  # of a sample
    bytes_read: int  # of a sample, from the host
    gradients: list[int]  # bytes of each parameter's gradient, in the model's order
    states: States
    precision: str
    bucket_cap_mb: float
    compression: float  # of gradients in transit: 0.5 for half precision
    clips: bool = True  # whether an update clips the norm of the gradients
    muon_flops: int = 0  # of Muon's products in an update
    sharing: Sharing | None = None  # None: each rank stores the whole model
    ownership: Ownership | None = None  # of Muon's matrices, if each rank stores the whole model
    tensor_sums: int = 0  # bytes that tensor ranks add up for a sample, one block after another


def step_time(work: Work, batch: Batch, hardware: Hardware) -> StepTime:
    """Predict one optimizer step.

    Forward and backward take their operations over the speed that is reached, which is the peak of
    the precision times the utilization, or as long as the host needs to start their kernels.
    """
    samples = batch.micro_size
    speed = hardware.flops(work.precision) * hardware.utilisation
    operations = samples * work.flops / batch.tensor_parallel
    micro_step = max(operations / speed, work.kernels * hardware.kernel_seconds)
    compute = batch.accumulation * micro_step
    moved = update_seconds(work, hardware)
    products = muon_seconds(work, hardware)
    update = moved + products
    everyone = Grid(batch.devices, batch.nodes)
    if batch.world_size == 1:
        exchange = 0.0
        algorithm = ""
        exposed = 0.0
    elif work.sharing:
        ranks, links = data_ranks(batch, hardware)
        exchange, exposed = _sharded(work.sharing, ranks, links, micro_step, batch.accumulation)
        matrices = _exchanged_matrices(work.sharing, ranks, links)
        exchange += matrices
        exposed += matrices
        algorithm = RING
        if work.tensor_sums:
            sums = batch.accumulation * tensor_seconds(samples * work.tensor_sums, batch, hardware)
            exchange += sums
            exposed += sums  # nothing is computed meanwhile
        # Each tensor rank orthogonalizes whole matrices.
        update = moved / batch.world_size + products / batch.data_parallel
    else:
        exchange, algorithm, exposed = _reduced(work, everyone, hardware, micro_step)
        if work.ownership:
            update = moved + work.ownership.largest_share(batch.world_size) * products
            # Some of it overlaps with the products of the next shape.
            gather = gather_seconds(work.ownership.updates, everyone, hardware)
            exchange += gather
            exposed += gather
    return StepTime(
        compute=compute,
        all_reduce=exchange,
        algorithm=algorithm,
        exposed=exposed,
        optimizer=update,
        data=batch.accumulation * samples * work.bytes_read / hardware.host_link.bandwidth,
    )


def update_seconds(work: Work, hardware: Hardware) -> float:
    """Return the seconds in which an update moves its bytes between memory and processors.

    It reads weights, gradients, and moments, and writes weights and moments. Clipping reads the
    gradients once more for their norm, then reads and writes them.
    """
    states = work.states
    gradients = 4 if work.clips else 1
    size = 2 * states.weights + gradients * states.gradients + 2 * states.optimizer
    return size / (hardware.memory_bandwidth * hardware.memory_share)


def muon_seconds(work: Work, hardware: Hardware) -> float:
    """Return the seconds of Muon's products, in bfloat16 if the device has a peak for it."""
    peak = in_form(hardware.peak, "bf16") or min(hardware.peak.values())
    return work.muon_flops / (peak * hardware.utilisation)


def _reduced(
    work: Work, ranks: Grid, hardware: Hardware, micro_step: float
) -> tuple[float, str, float]:
    """Return the all-reduce seconds, the largest bucket's algorithm, and the exposed seconds.

    Gradients are reduced once per step, during the backward of the last micro-step.
    """
    sizes = buckets(work.gradients, work.bucket_cap_mb)
    reduced = [all_reduce_seconds(size * work.compression, ranks, hardware) for size in sizes]
    seconds = [duration for duration, _ in reduced]
    _, algorithm = max(reduced)
    exposed = exposed_seconds(sizes, seconds, BACKWARD_SHARE * micro_step)
    return sum(seconds), algorithm, exposed


def _sharded(
    sharing: Sharing, ranks: Grid, hardware: Hardware, micro_step: float, accumulation: int
) -> tuple[float, float]:
    """Return the seconds of gathers and scatters, and how many of them are exposed.

    In each micro-step, including accumulated ones, a block is gathered while the one before it
    computes. Its gradients are scattered while the next block computes: in the last micro-step, or
    in each if gradients are not added up unsharded. Nothing can hide the first gathers and the
    last scatters. Compute time is assumed to be spread evenly over the blocks.
    """

    def seconds(elements: int, size: int) -> float:
        return gather_seconds(elements * size, ranks, hardware)

    count = max(1, sharing.blocks)
    gather = seconds(sharing.block, sharing.gathered_size)
    again = gather if sharing.reshards else 0.0
    rest = seconds(sharing.rest, 4)
    backward = BACKWARD_SHARE * micro_step / count
    forward = micro_step / count - backward

    def micro_step_seconds(scatter: float, scattered_rest: float) -> tuple[float, float]:
        ends = 2 * rest + gather + again + scatter + scattered_rest
        not_hidden = max(0.0, gather - forward) + max(0.0, again + scatter - backward)
        total = 2 * rest + scattered_rest + count * (gather + again + scatter)
        return total, ends + (count - 1) * not_hidden

    exchange, exposed = micro_step_seconds(
        scatter=seconds(sharing.block, sharing.reduced_size),
        scattered_rest=seconds(sharing.rest, sharing.reduced_size),
    )
    earlier_exchange = exchange
    earlier_exposed = exposed
    if sharing.adds_whole:
        earlier_exchange, earlier_exposed = micro_step_seconds(scatter=0.0, scattered_rest=0.0)
    earlier = accumulation - 1
    return earlier * earlier_exchange + exchange, earlier * earlier_exposed + exposed


def _exchanged_matrices(sharing: Sharing, ranks: Grid, hardware: Hardware) -> float:
    """Return the seconds in which Muon's matrices meet on their owners, and their updates return.

    In each round, every rank receives a matrix and sends one back, in the type of the products. As
    a bound from above, nothing hides this, and messages take as many steps as a ring.
    """
    if not sharing.matrices:
        return 0.0
    rounds = math.ceil(sharing.matrices / ranks.world_size)
    size = PRODUCT_SIZE * sharing.matrix_elements / ranks.world_size / rounds
    return 2 * rounds * gather_seconds(size, ranks, hardware)
