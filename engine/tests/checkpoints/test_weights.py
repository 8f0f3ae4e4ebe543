"""Weights of an earlier run, for a model that begins with them."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoints.reading import checkpoint_path, write_checkpoint
from lockstep.errors import UserError


class Owners(nn.Module):
    """What stands for a LightningModule with two parts."""

    def __init__(self, width=3, parts=("network",)):
        super().__init__()
        for part in parts:
            setattr(self, part, nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)))


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a module as a run does, and returns the run."""

    def save(module):
        path = checkpoint_path(tmp_path / "run/checkpoints", 1)
        write_checkpoint({"config": {}, "state_dict": module.state_dict()}, path)
        return tmp_path / "run"

    return save


def equal(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("place", ["", "checkpoints/step=000001.ckpt"])
def test_a_whole_module_or_a_part_of_it_gets_its_weights(saved, place):
    theirs = Owners()
    path = str(saved(theirs) / place)
    ours = Owners()
    lockstep.load_weights(path, ours)
    assert equal(ours, theirs)
    other = Owners()
    lockstep.load_weights(path, other.network)
    assert equal(other, theirs)


OTHERS = {
    "has network.0.weight of shape (3, 2), and Owners of (4, 2); build the same model": (
        lambda: Owners(4),
        {},
    ),
    "lacks other.0.weight, which Owners has; build the same model": (
        lambda: Owners(3, ("network", "other")),
        {},
    ),
    "has other.0.weight, which Owners lacks; build the same model": (
        Owners,
        {"parts": ("network", "other")},
    ),
    "has no weight of Conv1d, such as kernel": (
        lambda: nn.ParameterDict({"kernel": nn.Parameter(torch.ones(1))}),
        {},
    ),
    "has several parts like Sequential: network, other; load the whole module": (
        lambda: Owners().network,
        {"parts": ("network", "other")},
    ),
}


@pytest.mark.parametrize("line", OTHERS)
def test_weights_that_do_not_fit_are_one_line(saved, line):
    make, of_saved = OTHERS[line]
    path = saved(Owners(**of_saved))
    with pytest.raises(UserError) as refusal:
        lockstep.load_weights(path, make())
    assert str(refusal.value) == f"{path} {line}".replace("Conv1d", "ParameterDict")


def test_what_fits_is_loaded_if_the_rest_may_stay(saved):
    theirs = Owners(3, ("network", "other"))
    path = saved(theirs)
    ours = Owners(3, ("network", "new"))
    before = ours.new[0].weight.clone()
    lockstep.load_weights(path, ours, strict=False)
    assert equal(ours.network, theirs.network)
    assert torch.equal(ours.new[0].weight, before)


def test_a_checkpoint_that_has_diverged_is_refused(saved):
    theirs = Owners()
    theirs.network[0].weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"not finite, such as network\.0\.weight; choose others$"):
        lockstep.load_weights(saved(theirs), Owners())


def test_ranks_must_read_the_same(saved, on_ranks, tmp_path):
    path = saved(Owners())

    def load(rank):
        torch.manual_seed(rank)
        own = tmp_path / f"of-{rank}"
        content = {"config": {}, "state_dict": Owners().state_dict()}
        write_checkpoint(content, checkpoint_path(own / "checkpoints", 1))
        lockstep.load_weights(path, Owners())  # the same on both
        try:
            lockstep.load_weights(own, Owners())
        except UserError as refusal:
            return str(refusal)

    for line in on_ranks(2, load):
        assert "has other weights for rank 1 than for rank 0; name a folder that is the" in line
