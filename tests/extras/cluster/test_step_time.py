from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lockstep_gpt.extras.cluster.hardware import GB, HARDWARE, LINKS
from lockstep_gpt.extras.cluster.memory import States
from lockstep_gpt.extras.cluster.step_time import (
    MIB,
    Work,
    all_reduce_seconds,
    buckets,
    exposed_seconds,
    optimizer_seconds,
    ring_seconds,
    simple_seconds,
    step_time,
)
from lockstep_gpt.training.schedule import BatchPlan

IDEAL = replace(HARDWARE["a100-80"], link_efficiency=1.0)
WORK = Work(
    flops_per_token=10**9,
    gradients=[40 * MIB] * 4,
    states=States(160 * MIB, 160 * MIB, 320 * MIB),
    precision="bf16-mixed",
    bucket_cap_mb=25,
    compression=1.0,
    clips=True,
)


def spread(devices, nodes=1, accumulation=1, micro_size=8):
    return BatchPlan(micro_size, devices, nodes, accumulation, block_size=1024)


@pytest.mark.parametrize(("gigabytes", "milliseconds", "share"), [(16, 6, 0.11), (300, 0.3, 0.006)])
def test_a_hundred_megabytes_of_gradients_by_the_simple_rule(gigabytes, milliseconds, share):
    seconds = simple_seconds(100e6, gigabytes * GB)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.12)  # given to one digit
    assert seconds / (0.050 + seconds) == pytest.approx(share, rel=0.12)


def test_the_ring_of_four_moves_half_as_much_again():
    assert ring_seconds(100e6, 4, 16 * GB) == pytest.approx(1.5 * simple_seconds(100e6, 16 * GB))
    assert ring_seconds(100e6, 4, 300 * GB) * 1e3 == pytest.approx(0.5)
    assert ring_seconds(100e6, 1, 16 * GB) == 0


def test_ranks_first_add_up_in_their_node_then_between_nodes():
    within = all_reduce_seconds(GB, spread(8), IDEAL)
    both = all_reduce_seconds(GB, spread(8, nodes=4), IDEAL)
    between = ring_seconds(GB, 4, 8 * LINKS["hdr"].bandwidth) + 4 * LINKS["hdr"].latency
    assert within == pytest.approx(ring_seconds(GB, 8, 300 * GB) + 14 * LINKS["nvlink3"].latency)
    assert both == pytest.approx(within + between)


def test_buckets_are_those_that_torch_makes():
    sizes = [300_000, 7_000_000, 100, 2_000_000, 100, 9_000_000, 500_000, 3_000, 20]  # elements
    weights = [torch.empty(size, device="meta") for size in reversed(sizes)]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
    indices, _ = dist._compute_bucket_assignment_by_size(weights, limits)
    torchs = [sum(weights[index].nbytes for index in bucket) for bucket in indices]
    assert buckets([4 * size for size in sizes], cap_mb=25) == torchs


def test_the_last_bucket_cannot_hide_behind_backward():
    assert exposed_seconds([10, 10], [0.1, 0.1], backward=10.0) == pytest.approx(0.1)


def test_what_does_not_fit_beside_backward_is_exposed():
    assert exposed_seconds([10, 10], [3.0, 3.0], backward=2.0) == pytest.approx(5.0)


def test_one_device_waits_for_nobody():
    alone = step_time(WORK, spread(1), IDEAL)
    assert (alone.all_reduce, alone.exposed) == (0, 0)


def test_accumulation_reduces_once():
    one, four = (step_time(WORK, spread(8, accumulation=count), IDEAL) for count in (1, 4))
    assert four.all_reduce == one.all_reduce
    assert four.compute == pytest.approx(4 * one.compute)
    assert four.total < 4 * one.total


def test_compute_is_flops_over_the_share_of_the_peak_that_is_reached():
    time = step_time(WORK, spread(1), replace(IDEAL, utilisation=0.5))
    assert time.compute == pytest.approx(8 * 1024 * 10**9 / (0.5 * 312e12))


def test_half_precision_on_the_way_halves_the_exchange():
    link = replace(IDEAL.intra, latency=0.0)
    whole, half = (
        step_time(replace(WORK, compression=share), spread(8), replace(IDEAL, intra=link))
        for share in (1.0, 0.5)
    )
    assert half.all_reduce == pytest.approx(whole.all_reduce / 2)


def test_an_update_moves_weights_gradients_and_moments_through_memory():
    states = States(weights=4, gradients=4, optimizer=8)
    assert optimizer_seconds(states, clips=False, bandwidth=1.0) == 4 + 4 + 8 + 4 + 8
    assert optimizer_seconds(states, clips=True, bandwidth=1.0) == 28 + 12
