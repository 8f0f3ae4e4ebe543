"""Exact sums with MicroBatchSeeds: one hash of the weights on any number of ranks."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.errors import UserError

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {}),
}


def hash_of(foreign, world_size, leaves, kind, name, *callbacks, **settings):
    """Train as one of so many ranks, of which all have `leaves` micro-batches in a step."""
    make, arguments = OPTIMIZERS[name]
    module = foreign.module(kind, make=make, **arguments)
    callbacks = (MicroBatchSeeds(7), *callbacks)
    spread = {"world_size": world_size, "accumulation": leaves // world_size}
    foreign.train(module, *callbacks, exact=True, **spread, **settings)
    return foreign.digest(module)


CASES = [
    ("dict", "Adam"),
    *(
        pytest.param(kind, name, marks=pytest.mark.slow)
        for kind, name in (
            ("tuple", "fused AdamW"),
            ("tensor", "SGD"),
            ("dict", "RMSprop"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize(("leaves", "sizes"), [(4, (2, 4)), (12, (3,))])
def test_weights_have_one_hash_on_any_number_of_ranks(foreign, on_each, leaves, sizes, kind, name):
    """The bits of a foreign module's weights don't depend on ranks, with dropout, in any step."""

    def fit(world_size):
        return lambda _rank: hash_of(foreign, world_size, leaves, kind, name)

    (alone,) = on_each(1, fit(1))
    for world_size in sizes:
        assert on_each(world_size, fit(world_size)) == [alone] * world_size


def test_a_resumed_run_has_the_bits_of_one_rank(foreign, on_each, tmp_path):
    """Lightning's own checkpoint, at the same number of ranks."""
    path = tmp_path / "begun" / "third.ckpt"

    def fit(world_size, folder, **settings):
        def on_rank(_rank):
            saves = ModelCheckpoint(tmp_path / folder, path.stem, every_n_train_steps=3)
            return hash_of(foreign, world_size, 12, "dict", "Adam", saves, **settings)

        return on_each(world_size, on_rank)

    (alone,) = fit(1, "alone", steps=6)
    fit(3, "begun", steps=3)
    assert fit(3, "continued", steps=6, start=3, ckpt_path=path) == [alone] * 3


def test_numbers_of_micro_batches_without_equal_bits_are_refused(foreign, on_each):
    """A sum whose order would depend on the ranks is no exact one: one line says what is."""

    def fit(_rank):
        with pytest.raises(UserError) as refused:
            hash_of(foreign, 2, 12, "dict", "Adam")
        return str(refused.value)

    message, same = on_each(2, fit)
    assert message == same
    assert "accumulate_grad_batches=6 on 2 ranks" in message
    assert message.endswith("set accumulate_grad_batches=4 or 8")
