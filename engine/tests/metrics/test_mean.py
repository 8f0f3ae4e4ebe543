"""The mean of any values, exact over ranks and micro-batches."""

import functools
import math
import operator
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from lockstep.functional import IGNORE
from lockstep.metrics.mean import Mean, entries_of_ranks, means_of, replace_mean


def uneven_batches():
    """Logits and targets of batches of different sizes; some targets don't count."""
    random = torch.Generator().manual_seed(0)
    for rows, ignored in [(5, 0), (1, 3), (3, 10)]:
        targets = torch.randint(11, (rows, 7), generator=random)
        targets.view(-1)[:ignored] = IGNORE
        yield torch.randn(rows, 7, 11, generator=random), targets


def test_the_loss_over_uneven_batches_is_the_mean_over_all_tokens_that_count():
    metric, losses = Mean("loss"), []
    for logits, targets in uneven_batches():
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        metric.update(loss, weight=(targets != IGNORE).sum())
        each = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(each[targets.flatten() != IGNORE])
    expected = torch.cat(losses).mean()
    assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-6)
    assert metric.compute().dtype == torch.float64


def test_a_batch_of_only_padding_changes_nothing():
    metric = Mean("loss")
    metric.update(torch.tensor(2.0), weight=12)
    metric.update(torch.tensor(0.0), weight=0)
    assert metric.compute().item() == 2.0


def test_a_reset_forgets():
    metric = Mean("loss")
    metric.update(torch.tensor(9.0))
    metric.reset()
    metric.update(torch.tensor(1.0))
    assert metric.compute().item() == 1.0


def test_the_loss_is_the_same_to_the_bit_in_any_order_of_the_batches():
    random = torch.Generator().manual_seed(1)
    losses = 10 ** (9 * torch.rand(100, generator=random, dtype=torch.float64))
    found = set()
    for seed in range(5):
        metric = Mean("loss")
        for index in torch.randperm(100, generator=torch.Generator().manual_seed(seed)):
            metric.update(losses[index])
        found.add(metric.compute().item())
    assert len(found) == 1
    # The data is hard to sum; `sum` itself compensates for rounding since Python 3.12.
    orders = [losses[torch.randperm(100)].tolist() for _ in range(9)]
    assert len({functools.reduce(operator.add, order) for order in orders}) > 1


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_reported(loss):
    metric = Mean("loss")
    for each in (1.0, loss):
        metric.update(torch.tensor(each))
    assert metric.compute().item() == pytest.approx(loss, nan_ok=True)


def test_values_that_count_nothing_have_their_plain_mean():
    metric = Mean("loss")
    for value in (0.0, 3.0):
        metric.update(torch.tensor(value), weight=0)
    assert metric.compute().item() == 1.5


def test_weights_of_any_kind_give_the_rounded_exact_mean():
    metric, exact, weights = Mean("z"), Fraction(0), Fraction(0)
    pairs = [(0.1, 3), (2.5e8, 0.5), (-7.25, torch.tensor(11)), (1e-9, torch.tensor(0.125))]
    for value, weight in pairs:
        metric.update(torch.tensor(value, dtype=torch.float64), weight)
        exact += Fraction(value) * Fraction(float(weight))
        weights += Fraction(float(weight))
    assert metric.compute().item() == pytest.approx(float(exact / weights), rel=1e-15)


def test_a_value_keeps_no_graph_alive():
    metric = Mean("loss")
    metric.update(torch.ones((), requires_grad=True) * 2)
    assert not metric.values[0].requires_grad


VALUES = torch.rand(24, generator=torch.Generator().manual_seed(1))


def test_any_spread_over_ranks_has_equal_bits(on_ranks):
    whole = Mean("loss")
    for value in VALUES:
        whole.update(value)
    expected = whole.compute().item()
    for ranks in (2, 3):

        def mean_on(rank, ranks=ranks):
            part = Mean("loss")
            for value in VALUES[rank::ranks] if ranks == 2 else VALUES[6 * rank : 6 * rank + 6]:
                part.update(value)
            if ranks == 3 and rank == 2:  # the last rank has more than the others
                for value in VALUES[18:]:
                    part.update(value)
            return part.compute().item()

        assert on_ranks(ranks, mean_on) == [expected] * ranks


def test_a_rank_without_values_takes_part(on_ranks):
    def mean_on(rank):
        part = Mean("loss")
        if rank == 1:
            part.update(torch.tensor(4.0))
        return entries_of_ranks({"loss": part, "other": Mean("other")})

    assert on_ranks(2, mean_on) == [{"loss": [[], [(4.0, 1.0)]]}] * 2


def test_a_saved_mean_goes_on_with_equal_bits():
    whole, first, later = (Mean("loss") for _ in range(3))
    for number, value in enumerate(VALUES):
        whole.update(value)
        if number < 10:
            first.update(value)
    later.load_entries(first.entries())
    assert later.count == 10
    for value in VALUES[10:]:
        later.update(value)
    assert later.compute().item() == whole.compute().item()
    later.reset()
    assert later.count == 0


def test_means_are_found_at_any_depth_and_can_be_replaced():
    inner = torch.nn.Sequential(torch.nn.Linear(1, 1))
    inner.mean = Mean("inner")
    outer = torch.nn.ModuleList([inner])
    outer.mean = Mean("outer")
    assert set(means_of(outer)) == {"inner", "outer"}
    other = Mean("inner", also={"twice": lambda mean: 2 * mean})
    replace_mean(outer, other)
    assert means_of(outer)["inner"] is other
    assert other.columns([[(2.0, 1.0)], [(4.0, 1.0)]]) == {"inner": 3.0, "twice": 6.0}
