"""Each source's validation loss is exact, and their mean follows the weights."""

import math

import pytest
import torch

from lockstep.errors import UserError
from lockstep.mixtures.by_source import LossBySource
from lockstep.ranks.ranks import from_each_rank

SHARES = {"code": 0.75, "prose": 0.25, "old": 0.0}


def losses_of(loss):
    """Return what is logged: the mean, and the loss of each source."""
    row = loss.columns(from_each_rank(loss.entries()))
    prefix = "val/loss/"
    sources = {name[len(prefix) :]: row[name] for name in row if name.startswith(prefix)}
    return row["val/loss"], sources


def test_a_source_s_loss_is_the_mean_over_its_tokens():
    loss = LossBySource(SHARES, [2, 1, 1])
    for mean, count in ((1.0, 4), (4.0, 2), (3.0, 4), (math.inf, 1)):
        loss.update(torch.tensor(mean), count)
    assert float(loss.compute()) == 0.75 * 2.0 + 0.25 * 3.0
    assert losses_of(loss) == (loss.compute(), {"code": 2.0, "prose": 3.0, "old": math.inf})


def test_a_source_without_a_target_that_counts_is_one_line():
    loss = LossBySource(SHARES, [1, 1, 1])
    for count in (4, 0, 4):
        loss.update(torch.tensor(0.0), count)
    with pytest.raises(
        UserError, match=r"^data\.source\.sources\.prose: no target of its validation"
    ):
        loss.compute()


def test_a_reset_begins_the_next_validation():
    loss = LossBySource({"a": 1.0}, [1])
    for mean in (5.0, 1.0):
        loss.update(torch.tensor(mean), 4)
        assert float(loss.compute()) == mean
        loss.reset()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_up_to_the_bits_of_one(size, on_ranks):
    means = torch.rand(6 * 3, generator=torch.Generator().manual_seed(1))
    counts = [1, 4, 3, 2, 4, 4] * 3

    def loss_of(rows, batches):
        loss = LossBySource({"a": 0.5, "b": 0.5}, batches)
        for row in rows:
            loss.update(means[row], counts[row])
        return losses_of(loss)

    def on_rank(rank):
        first = [*range(6)][rank::size]
        second = [*range(6, 18)][rank::size]
        return loss_of([*first, *second], [len(first), len(second)])

    assert on_ranks(size, on_rank) == [loss_of(range(18), [6, 12])] * size
