import random

import numpy as np
import pytest
import torch

from lockstep.callbacks.seeds import MicroBatchSeeds, leaf_seed


def test_seeds_of_steps_and_micro_batches_are_never_confused():
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1), (2**40, 0, 0)]
    seeds = {leaf_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch then seeds the GPU instead")
def test_no_step_formats_its_stack_for_a_device_that_is_missing(new_run, monkeypatch):
    run, calls = new_run(max_steps=3), []
    monkeypatch.setattr("traceback.format_stack", lambda *_: calls.append(1))
    run.fit()
    assert not calls
    torch.manual_seed(0)
    assert calls  # if this fails, torch no longer needs our workaround


def test_all_global_generators_begin_a_micro_batch_in_a_state_of_its_own(new_run):
    drawn = []

    def draw(self, batch, batch_idx):
        numbers = (torch.rand(()).item(), np.random.rand(), random.random())  # noqa: NPY002
        drawn.append(numbers)
        return type(self).training_step(self, batch, batch_idx)

    for _ in range(2):
        run = new_run(max_steps=3)
        run.module.training_step = draw.__get__(run.module)
        run.fit(MicroBatchSeeds(1))
        np.random.rand()  # noqa: NPY002
        random.random()
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert len({number for numbers in drawn for number in numbers}) == 3 * len(drawn) // 2
