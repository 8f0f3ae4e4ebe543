"""Sums of gradients: the tree, rejected settings, and equal bits in real runs."""

import contextlib
import copy
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch import Batch, exact_world_sizes, gradient_copies
from lockstep.errors import UserError
from lockstep.strategies.exact_sums import ExactSums, PairwiseSum, exact_kernels


def tree(values):
    """Return the sum in the order of the tree, by definition."""
    if len(values) == 1:
        return values[0]
    lower = 1 << ((len(values) - 1).bit_length() - 1)  # the largest power of two below
    return tree(values[:lower]) + tree(values[lower:])


def summed(values):
    sums = PairwiseSum()
    for value in values:
        sums.add([value.clone()])
    return sums.total()[0]


def leaves(count, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** (6 * torch.rand(count, 1, generator=generator) - 3)
    return [*(torch.randn(count, size, generator=generator) * scales)]


@pytest.mark.parametrize("count", [*range(1, 40), 63, 64, 65, 1000])
def test_gradients_added_one_by_one_give_the_tree_s_sum(count):
    values = leaves(count)
    assert torch.equal(summed(values), tree(values))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(0, 10), st.integers(1, 40), st.integers(0, 1000))
def test_any_rank_s_part_is_a_subtree_for_all_slices(count, choice, size, seed):
    sizes = exact_world_sizes(count, 1)
    world = sizes[choice % len(sizes)]
    values = leaves(count, size, seed)
    block = count // world
    parts = [summed(values[rank * block : (rank + 1) * block]) for rank in range(world)]
    slices = [summed([part[cut::world] for part in parts]) for cut in range(world)]
    whole = torch.empty(size)
    for cut, piece in enumerate(slices):
        whole[cut::world] = piece
    assert torch.equal(whole, tree(values))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 12, 100])
def test_as_many_copies_of_the_gradients_are_kept_as_the_plan_says(count):
    sums, most = PairwiseSum(), 0
    for value in leaves(count):
        most = max(most, len(sums.partial()))
        sums.add([value])
    assert most == gradient_copies(count, is_exact=True) <= math.log2(count)
    assert gradient_copies(count, is_exact=False) == 0


def test_the_error_of_the_tree_is_far_below_that_of_a_sum_one_by_one():
    values = [*torch.rand(4096, 20, generator=torch.Generator().manual_seed(0))]
    exact = [sum(map(Fraction, column)) for column in torch.stack(values).T.tolist()]
    one_by_one = values[0].clone()
    for value in values[1:]:
        one_by_one += value

    def error(found):
        pairs = zip(found.tolist(), exact, strict=True)
        return max(float(abs(Fraction(ours) - right) / right) for ours, right in pairs)

    unit = 2.0**-24  # Higham 1993: a bound of log2(n) units; a sum one by one has n
    assert error(summed(values)) <= 12 * unit
    assert error(one_by_one) > 3 * error(summed(values))


def test_numbers_of_devices_with_equal_sums_are_listed():
    assert exact_world_sizes(12, 1) == [1, 3, 6, 12]
    assert exact_world_sizes(8, 1) == exact_world_sizes(16, 2) == [1, 2, 4, 8]
    assert exact_world_sizes(7, 1) == [1, 7]
    assert exact_world_sizes(4, 4) == [1]


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (2, "on 1, 3, 6, or 12 devices, not on 2; .* set batch.exact_micro_size=3"),
        (5, "not on 5; .* set batch.global_size=10"),
    ],
)
def test_other_numbers_of_devices_are_rejected_with_the_nearest_size(world, said):
    with pytest.raises(UserError, match=said):
        Batch(12, exact_micro_size=1).spread_over(world)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"global_size": 12, "exact_micro_size": 5},
            "=12; set batch.global_size=10 or batch.exact_micro_size=4$",
        ),
        ({"global_size": 12, "exact_micro_size": 99}, "=12; set batch.exact_micro_size=12$"),
        ({"global_size": 1, "exact_micro_size": 2}, "=1; set batch.exact_micro_size=1$"),
        ({"global_size": 31, "exact_micro_size": 4}, "=31; set batch.global_size=32$"),
        ({"global_size": 12, "exact_micro_size": 0}, "exact_micro_size=0 must be at least 1"),
        ({"micro_size": 4, "exact_micro_size": 4}, "needs a batch.global_size, which is null"),
        ({"global_size": 12, "micro_size": 4, "exact_micro_size": 2}, "are two sizes"),
    ],
)
def test_contradicting_sizes_are_rejected(batch, said):
    with pytest.raises(UserError, match=said):
        Batch(**batch)


class Step(Callback):
    """Keeps the micro-batches of a step, and the gradients of its update before clipping."""

    def __init__(self):
        self.batches, self.gradients = [], []

    def on_train_batch_start(self, _trainer, _module, batch, _batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, _trainer, module, _optimizer):
        self.gradients = [parameter.grad.clone() for parameter in module.parameters()]


EXACT = {"global_size": 8, "exact_micro_size": 2, "micro_size": None}


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_one_rank_averages_its_micro_batches_in_the_tree_s_order(new_run, micro):
    run = new_run(max_steps=1, batch={**EXACT, "exact_micro_size": micro})
    model, step = copy.deepcopy(run.module.model), Step()
    run.fit(step)
    each = []
    for batch in step.batches:
        model.zero_grad()
        model(*batch).backward()
        each.append([parameter.grad for parameter in model.parameters()])
    assert len(each) == 8 // micro
    for index, found in enumerate(step.gradients):
        assert torch.equal(found, tree([gradients[index] for gradients in each]) * (micro / 8))


def test_a_mean_of_twelve_is_that_of_the_tree(new_run):
    run = new_run(max_steps=1, batch={**EXACT, "global_size": 12, "exact_micro_size": 1})
    model, step = copy.deepcopy(run.module.model), Step()
    run.fit(step)
    losses = [model(*batch) for batch in step.batches]
    expected = torch.autograd.grad(sum(losses) / 12, [*model.parameters()])
    for found, reference in zip(step.gradients, expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-6)


def kernel_flags():
    cuda = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
    )


@pytest.mark.parametrize("cudnn", [True, False])
def test_exact_runs_on_gpus_use_no_cudnn_attention_and_leave_the_flags_as_they_were(
    monkeypatch, cudnn
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        with exact_kernels(1, "cuda"):
            assert kernel_flags() == (True, False, True)
        assert kernel_flags() == (False, cudnn, True)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_model_with_a_batchnorm_is_rejected(new_run):
    run = new_run(max_steps=1, batch=EXACT)
    run.module.norm = nn.BatchNorm1d(3)
    with pytest.raises(UserError, match="has a BatchNorm"):
        run.fit()


def test_a_parameter_without_a_gradient_is_rejected(new_run):
    run = new_run(max_steps=1, batch=EXACT)
    run.module.model.unused = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"1 of .* parameters got no gradient"):
        run.fit()


def gradients_on(rank, world, total, ddp=True):
    """Return the bits of a step's gradients on one of `world` ranks, in several uneven buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 301), nn.Tanh(), nn.Linear(301, 13), nn.Linear(13, 1))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005) if ddp else model
    batch = Batch(total, exact_micro_size=1).spread_over(world)
    sums = ExactSums(model, world, torch.device("cpu"), in_ddp=ddp)
    if ddp:
        wrapped.register_comm_hook(None, sums.exchange)
    found = []
    for step in range(3):  # DDP rebuilds its buckets after the first
        samples = torch.randn(total, 7, generator=torch.Generator().manual_seed(step))
        for leaf in range(batch.accumulation):
            is_last = leaf == batch.accumulation - 1
            with contextlib.nullcontext() if is_last or not ddp else wrapped.no_sync():
                loss = wrapped(samples[rank * batch.accumulation + leaf]).square().sum()
                (loss / batch.accumulation * sums.factor(batch.accumulation)).backward()
            sums.add(is_last)
        found += [parameter.grad.numpy().tobytes() for parameter in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("total", "worlds"), [(8, (1, 2, 4, 8)), (12, (1, 3, 6)), (5, (5,))])
def test_ranks_get_the_bits_of_one_rank(on_ranks, total, worlds):
    (expected,) = on_ranks(1, lambda rank: gradients_on(rank, 1, total, ddp=False))
    for world in worlds:
        found = on_ranks(world, lambda rank, world=world: gradients_on(rank, world, total))
        assert all(gradients == expected for gradients in found), world
