"""CountTargets alone: batches that are padded to a length weigh by what counts in them."""

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.callbacks.counted_targets import CountTargets

slow = pytest.mark.slow
IGNORED = -100
STEPS = 4
LENGTH = 6


class Gradients(lightning.Callback):
    """Keeps the gradients of each step, as the optimizer gets them."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, _trainer, pl_module, _optimizer):
        self.steps.append([weight.grad.flatten().tolist() for weight in pl_module.parameters()])


@pytest.fixture
def padded(foreign):
    """A project whose batches are dicts of sequences of several lengths, padded."""

    class Sequences(torch.utils.data.Dataset):
        def __init__(self):
            random = torch.Generator().manual_seed(1)
            shape = (foreign.SAMPLES, LENGTH)
            self.ids = torch.randint(8, shape, generator=random)
            self.labels = torch.randint(2, shape, generator=random)
            lengths = torch.randint(LENGTH + 1, (foreign.SAMPLES, 1), generator=random)
            lengths[torch.rand(lengths.shape, generator=random) < 0.4] = 0  # nothing counts
            self.labels[torch.arange(LENGTH) >= lengths] = IGNORED

        def __len__(self):
            return len(self.ids)

        def __getitem__(self, i):
            return {"input_ids": self.ids[i], "labels": self.labels[i]}

    class Padded(foreign.Module):
        def loss_of(self, batch):
            logits = self.net(nn.functional.one_hot(batch["input_ids"], 8).to(self.dtype))
            losses = nn.functional.cross_entropy(
                logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED, reduction="sum"
            )
            return losses / (batch["labels"] != IGNORED).sum().clamp(min=1)  # a mean

    def fit(spread, *callbacks, **settings):
        world_size, accumulation = spread
        module, found = foreign.module(of=Padded, dropout=0, make=torch.optim.SGD), Gradients()
        order = foreign.StepOrder(foreign.rank(), world_size, accumulation)
        spread = {"world_size": world_size, "accumulation": accumulation, "steps": STEPS}
        loader = DataLoader(Sequences(), batch_sampler=order)
        settings = {"precision": "64-true", **settings}
        foreign.train(module, *callbacks, found, loaders=(loader,), **spread, **settings)
        return found.steps

    return fit


def count(batch):
    return (batch["labels"] != IGNORED).sum()


def weigh(batch):
    """Return the sum of weights that are no whole numbers, and that float32 rounds."""
    return ((batch["labels"] != IGNORED) * (0.1 + batch["input_ids"] / 7)).sum()


def largest_difference(steps, others):
    pairs = zip(steps, others, strict=True)
    numbers = [
        (torch.cat([*map(torch.tensor, s)]), torch.cat([*map(torch.tensor, o)])) for s, o in pairs
    ]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in numbers)


@pytest.mark.parametrize(
    "spread",
    [
        (1, 6),
        (1, 24),  # two samples each: in some micro-batches, nothing counts
        (2, 3),
        (3, 4),
        pytest.param((2, 1), marks=slow),
        pytest.param((4, 2), marks=slow),
    ],
)
def test_the_gradient_is_that_of_one_mean_over_all_that_counts(on_each, padded, spread):
    """However a step is spread, each target has the same weight, up to float64 rounding."""
    whole = padded((1, 1))  # one micro-batch: the mean over all its targets
    ranks = on_each(spread[0], lambda _rank: padded(spread, CountTargets(count, typical=100)))
    assert all(steps == ranks[0] for steps in ranks)
    assert largest_difference(ranks[0], whole) < 1e-12


def test_without_it_padding_changes_the_weights(padded):
    """The mean of means overweights samples in micro-batches with much padding."""
    assert largest_difference(padded((1, 6)), padded((1, 1))) > 1e-3


@pytest.mark.parametrize("spread", [(1, 6), (2, 3)])
def test_a_norm_is_clipped_after_the_count(on_each, padded, spread):
    """ClipAndSkip, listed after it, clips the gradient of the one mean."""

    def clipped(spread):
        return lambda _rank: padded(spread, CountTargets(count), ClipAndSkip(0.01))

    (whole,) = on_each(1, clipped((1, 1)))
    for steps in on_each(spread[0], clipped(spread)):
        assert largest_difference(steps, whole) < 1e-12


@pytest.mark.parametrize("count", [count, weigh])
@pytest.mark.parametrize("sizes", [(2, 4)])
def test_exact_sums_have_equal_bits_on_any_ranks(on_each, padded, sizes, count):
    """With exact sums, gradients have the same bits on any number of ranks."""

    def fit(world_size):
        spread = world_size, 4 // world_size
        settings = {"exact": True, "precision": "32-true"}
        return on_each(world_size, lambda _rank: padded(spread, CountTargets(count), **settings))

    (alone,) = fit(1)
    for world_size in sizes:
        assert fit(world_size) == [alone] * world_size
