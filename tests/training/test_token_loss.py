import functools
import math
import operator

import pytest
import torch
import torch.nn.functional as F

from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.training.token_loss import TokenLoss


def uneven_batches():
    """Logits and targets of batches of different sizes; some targets don't count."""
    random = torch.Generator().manual_seed(0)
    for rows, ignored in [(5, 0), (1, 3), (3, 10)]:
        targets = torch.randint(11, (rows, 7), generator=random)
        targets.view(-1)[:ignored] = IGNORE
        yield torch.randn(rows, 7, 11, generator=random), targets


def test_the_loss_over_uneven_batches_is_the_mean_over_all_tokens_that_count():
    metric, losses = TokenLoss(), []
    for logits, targets in uneven_batches():
        metric.update(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets)
        each = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(each[targets.flatten() != IGNORE])
    expected = torch.cat(losses).mean()
    assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-6)
    assert metric.compute().dtype == torch.float64


def test_a_batch_of_only_padding_changes_nothing():
    metric = TokenLoss()
    metric.update(torch.tensor(2.0), torch.zeros(3, 4, dtype=torch.int64))
    metric.update(torch.tensor(0.0), torch.full((3, 4), IGNORE))
    assert metric.compute().item() == 2.0


def test_a_reset_forgets():
    metric = TokenLoss()
    metric.update(torch.tensor(9.0), torch.zeros(1, 4, dtype=torch.int64))
    metric.reset()
    metric.update(torch.tensor(1.0), torch.zeros(1, 4, dtype=torch.int64))
    assert metric.compute().item() == 1.0


def test_the_loss_is_the_same_to_the_bit_in_any_order_of_the_batches():
    random = torch.Generator().manual_seed(1)
    losses = 10 ** (9 * torch.rand(100, generator=random, dtype=torch.float64))
    targets = torch.zeros(1, 4, dtype=torch.int64)
    found = set()
    for seed in range(5):
        metric = TokenLoss()
        for index in torch.randperm(100, generator=torch.Generator().manual_seed(seed)):
            metric.update(losses[index], targets)
        found.add(metric.compute().item())
    assert len(found) == 1
    # The data is hard to sum; `sum` itself compensates for rounding since Python 3.12.
    orders = [losses[torch.randperm(100)].tolist() for _ in range(9)]
    assert len({functools.reduce(operator.add, order) for order in orders}) > 1


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_reported(loss):
    metric = TokenLoss()
    for each in (1.0, loss):
        metric.update(torch.tensor(each), torch.zeros(1, 4, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(loss, nan_ok=True)
