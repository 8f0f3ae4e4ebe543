"""MicroBatchSeeds alone, with Lightning's own strategies."""

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lockstep.callbacks.seeds import MicroBatchSeeds

STEPS = 3


class Masks(lightning.Callback):
    """Notes which numbers dropout keeps in each micro-batch: (step, micro-batch) -> text."""

    def __init__(self, spoil):
        self.spoil = spoil
        self.seen = {}

    def setup(self, trainer, pl_module, stage):
        place = trainer.global_rank * trainer.accumulate_grad_batches

        def note(_layer, inputs, output):
            kept = (output != 0) | (inputs[0] == 0)
            leaf = place + self.index % trainer.accumulate_grad_batches
            self.seen[trainer.global_step, leaf] = str(kept.int().tolist())

        pl_module.net[2].register_forward_hook(note)

    def on_train_batch_start(self, _trainer, _module, _batch, batch_idx):
        self.index = batch_idx

    def on_train_batch_end(self, *_):
        torch.rand(self.spoil)  # what else a process may do between micro-batches


def masks_of(foreign, world_size, leaves, seed=7, spoil=0):
    """Return the masks that this rank sees."""
    masks = Masks(spoil)
    module = foreign.module()
    with torch.no_grad():
        module.net[0].bias += 100  # so that no number is zero but for dropout
    torch.manual_seed(100 * foreign.rank() + spoil)
    strategy = "auto"
    if world_size > 1:
        strategy = DDPStrategy(process_group_backend="gloo")
    spread = {"world_size": world_size, "accumulation": leaves // world_size}
    callbacks = [MicroBatchSeeds(seed), masks]
    foreign.train(module, *callbacks, steps=STEPS, strategy=strategy, **spread)
    return masks.seen


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_masks_depend_on_step_and_micro_batch_only(foreign, on_each, world_size):
    """Neither ranks, nor what a process drew before or between, change a mask."""
    leaves = 12
    alone = masks_of(foreign, 1, leaves)
    assert len({*alone.values()}) == len(alone) == STEPS * leaves
    ranks = on_each(world_size, lambda rank: masks_of(foreign, world_size, leaves, spoil=rank + 1))
    together = {place: mask for seen in ranks for place, mask in seen.items()}
    assert together == alone


def test_other_seeds_have_other_masks(foreign):
    """The seed of the run decides the masks."""
    masks, others = (masks_of(foreign, 1, 2, seed) for seed in (7, 8))
    assert masks.keys() == others.keys()
    assert not {*masks.values()} & {*others.values()}
