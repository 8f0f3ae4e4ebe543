"""Gradients stay in DDP's buckets while micro-batches are accumulated."""

import lightning
import pytest
import torch

from lockstep.patches.torch import empty_buckets
from lockstep.strategies import placing as strategies

SETTINGS = {
    "process_group_backend": "gloo",
    "timeout_seconds": 60,
    "comm_hook": "none",
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 0.004,  # several buckets
}


class Storages(lightning.Callback):
    """Collects the addresses of the gradients' storages before and after each backward."""

    def __init__(self):
        self.seen = []
        self.buckets = 0

    def on_before_backward(self, trainer, pl_module, _loss=None):
        gradients = [weight.grad for weight in pl_module.parameters()]
        present = [each for each in gradients if each is not None]
        if trainer.global_step:  # the first one arranges the buckets
            self.seen.append({each.untyped_storage().data_ptr() for each in present})

    def on_after_backward(self, trainer, pl_module):
        self.on_before_backward(trainer, pl_module)
        self.buckets = len(empty_buckets(trainer.strategy.model))
        self.kept = trainer.strategy.keeps_gradients


def storages_on_two(on_ranks, new_run, strategy=(), **settings):
    """Fit on two ranks; return storages by micro-batch, the number of buckets, and `kept`."""

    def fit(_rank):
        run, storages = new_run(**settings), Storages()
        ddp = strategies.ddp(run.batch, **{**SETTINGS, **dict(strategy)})
        run.fit(storages, strategy=ddp, devices=2)
        assert all(weight.grad is None for weight in run.module.parameters())
        return storages.seen, storages.buckets, storages.kept

    found = on_ranks(2, fit)[0]
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_gradients_are_in_the_same_buckets_in_all_micro_batches(
    on_ranks, new_run, algorithm, precision
):
    settings = {"precision": precision, "optim": {"algorithm": algorithm}}
    # With validations, before which Lightning would free the gradients.
    seen, buckets, kept = storages_on_two(on_ranks, new_run, **settings)
    assert kept
    assert len(seen) == 5 * 2 * 2
    assert all(storages == seen[0] for storages in seen)
    assert len(seen[0]) == buckets == 4


@pytest.mark.parametrize("name", ["static_graph", "compressed"])
def test_other_ways_to_reduce_leave_gradients_in_the_buckets(on_ranks, new_run, name):
    strategy = {"static_graph": {"static_graph": True}, "compressed": {"comm_hook": "fp16"}}[name]
    seen, buckets, _ = storages_on_two(on_ranks, new_run, strategy=strategy)
    assert all(storages == seen[0] for storages in seen)
    assert len(seen[0]) == buckets


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"micro_size": 4}},
        {
            "batch": {"micro_size": None, "exact_micro_size": 2},
            "strategy": {"static_graph": True},
        },
        {"strategy": {"find_unused_parameters": True}},
        {"strategy": {"gradient_as_bucket_view": False}},
    ],
    ids=["no accumulation", "exact sums", "unused parameters", "no views"],
)
def test_gradients_are_freed_where_buckets_save_nothing_or_zeros_are_wrong(
    on_ranks, new_run, changes
):
    seen, _, kept = storages_on_two(on_ranks, new_run, **changes)
    assert not kept
    assert seen[0] == set()


class Spare(lightning.Callback):
    """Adds a parameter to the loss of the first two steps only."""

    def setup(self, trainer, pl_module, **_stage):
        model = pl_module.model
        model.spare = torch.nn.Parameter(torch.ones(3))

        def add(_model, _inputs, loss):
            return loss + model.spare.square().sum() if trainer.global_step < 2 else loss

        model.register_forward_hook(add)

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == 2:
            self.before = pl_module.model.spare.tolist()


def test_updates_leave_a_parameter_that_their_steps_did_not_use(on_ranks, new_run):
    def fit(_rank):
        run, spare = new_run(val_every=100), Spare()
        strategy = strategies.ddp(**SETTINGS, find_unused_parameters=True)
        run.fit(spare, strategy=strategy, devices=2)
        return spare.before, run.module.model.spare.tolist()

    for before, after in on_ranks(2, fit):
        assert before == after != [1, 1, 1]
