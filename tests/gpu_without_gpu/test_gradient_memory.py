"""The gradients of a step with several micro-batches are DDP's buckets, and nothing beside them."""

from __future__ import annotations

import os

import pytest
from lightning import Callback

from lockstep_gpt.distributed import strategies

DDP = {"process_group_backend": None, "timeout_seconds": 60, "comm_hook": "none"}
STEPS = 3  # of two micro-batches each


class GradientPlaces(Callback):
    """Records where the gradients are in memory after each micro-batch, and its loss."""

    def __init__(self):
        self.places: list[set[int]] = []
        self.losses: list[float] = []

    def on_after_backward(self, trainer, pl_module):  # noqa: ARG002
        storages = [weight.grad.untyped_storage() for weight in pl_module.trained]
        self.places.append({storage.data_ptr() for storage in storages})

    def on_train_batch_end(self, *arguments):
        self.losses.append(float(arguments[2]["loss"]))


@pytest.fixture
def places_on_two(on_ranks, new_run, rank_environment):
    """Return rank 0's places and losses of a run on two ranks, with settings of DDP."""

    def fit(**settings):
        def rank(number):
            os.environ.update(rank_environment(number, 2))
            recorder = GradientPlaces()
            run = new_run(max_steps=STEPS)
            run.fit(recorder, strategy=strategies.ddp(**DDP, **settings), devices=2)
            return recorder.places, recorder.losses

        return on_ranks(2, rank)[0]

    return fit


def test_gradients_of_all_micro_batches_are_in_the_same_buckets(places_on_two):
    places, _ = places_on_two(gradient_as_bucket_view=True)
    assert len(places) == 2 * STEPS
    assert places == [places[0]] * len(places)
    assert len(places[0]) == 1  # one bucket has the whole small model


def test_losses_are_those_of_gradients_beside_the_buckets(places_on_two):
    places, losses = places_on_two(gradient_as_bucket_view=False)
    assert max(map(len, places)) > 1
    assert places_on_two(gradient_as_bucket_view=True)[1] == losses


def test_an_unused_parameter_keeps_having_no_gradient(places_on_two):
    """An optimizer skips such a parameter; zeros instead would let its weight decay."""
    places, _ = places_on_two(gradient_as_bucket_view=True, find_unused_parameters=True)
    assert places != [places[0]] * len(places)
