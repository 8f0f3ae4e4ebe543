"""Muon on a foreign module's matrices; the ranks of our DDP share its work by themselves."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lockstep_gpt.optim import muon
from torch import nn

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.muon.owned import OwnedMatrices

slow = pytest.mark.slow


@pytest.fixture
def with_muon(foreign):
    """A module whose inner matrices are Muon's; large enough that ranks own some."""

    class Shared(foreign.Module):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            first, *rest = self.net
            inner = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
            self.net = nn.Sequential()
            self.net.add_module("first", first)
            self.net.add_module("blocks", nn.Sequential(*inner))
            self.net.add_module("rest", nn.Sequential(*rest))

        def configure_optimizers(self):
            return muon(self.named_parameters(), lr=0.02, weight_decay=0.1)

    return lambda kind="dict", **settings: foreign.module(kind, of=Shared, **settings)


@pytest.mark.parametrize(
    "spread", [(2, 2), pytest.param((4, 1), marks=slow), pytest.param((3, 2), marks=slow)]
)
def test_ranks_that_share_the_matrices_train_as_one_rank(foreign, on_each, with_muon, spread):
    """Weights are those of one rank on the whole batch, up to rounding, and equal on all ranks."""

    def fit(world_size, accumulation):
        def on_rank(_rank):
            module = with_muon(dropout=0)
            spread = {"world_size": world_size, "accumulation": accumulation}
            foreign.train(module, precision="64-true", **spread)
            optimizer = module.optimizers().optimizer
            assert len(optimizer.matrices) == 3
            is_owned = isinstance(optimizer.placement, OwnedMatrices)
            assert is_owned == (world_size > 1)
            return foreign.weights(module)

        return on_each(world_size, on_rank)

    (alone,) = fit(1, 1)
    ranks = fit(*spread)
    assert all(rank == ranks[0] for rank in ranks)
    for weight, wanted in zip(ranks[0], alone, strict=True):
        # Muon computes in 32 or 16 bits, whatever the weights have; 8 steps move them by 0.16.
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "leaves", "sizes"), [("dict", 4, (2, 4)), pytest.param("tuple", 12, (3,), marks=slow)]
)
def test_exact_sums_have_equal_bits_on_any_ranks(foreign, on_each, with_muon, kind, leaves, sizes):
    """With exact sums, who updates a matrix doesn't change a bit of it."""

    def fit(world_size):
        def on_rank(_rank):
            module = with_muon(kind)
            spread = {"world_size": world_size, "accumulation": leaves // world_size}
            foreign.train(module, MicroBatchSeeds(7), exact=True, **spread)
            return foreign.digest(module)

        return on_each(world_size, on_rank)

    (alone,) = fit(1)
    for world_size in sizes:
        assert fit(world_size) == [alone] * world_size


@pytest.mark.parametrize("again", [1, 2, pytest.param(4, marks=slow)])
def test_lightning_s_checkpoint_has_all_momenta(foreign, on_each, with_muon, tmp_path, again):
    """A run that two ranks began continues on other ranks, with the bits of one rank."""
    path = tmp_path / "begun" / "fourth.ckpt"

    def fit(world_size, folder, **settings):
        def on_rank(_rank):
            module = with_muon()
            saves = ModelCheckpoint(tmp_path / folder, path.stem, every_n_train_steps=4)
            spread = {"world_size": world_size, "accumulation": 4 // world_size}
            foreign.train(module, MicroBatchSeeds(7), saves, exact=True, **spread, **settings)
            return foreign.digest(module)

        return on_each(world_size, on_rank)

    (alone,) = fit(1, "alone", steps=6)
    fit(2, "begun", steps=4)
    rest = {"steps": 6, "start": 4, "ckpt_path": path}
    assert fit(again, "rest", **rest) == [alone] * again
