"""Real runs that end with equal bits."""

import pytest
import torch

GPUS = torch.cuda.device_count()
TWO = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
FOUR = pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")


def test_a_resumed_run_keeps_its_threads_on_other_numbers_of_devices(command):
    words = ["batch.exact_micro_size=2", "optim.decay=constant", "optim.warmup_steps=0"]
    every = ["checkpoint.every=2", "val_every=2", "model.dropout=0.1"]
    command.train(*words, *every, "run_dir=whole", "max_steps=6")
    two = ["trainer=cpu", "trainer.devices=2", "max_steps=4"]
    command.train(*words, *every, "run_dir=run", *two)
    go_on = ["train", "run_dir=run", "resume=auto", "max_steps=6"]
    said = command(*go_on, "trainer.devices=3", status=2).stderr
    assert "gives equal bits on 1, 2, or 4 devices, not on 3" in said
    said = command(*go_on, "batch.exact_threads=2", status=2).stderr
    assert "batch.exact_threads=2 instead of 1" in said
    command(*go_on, "trainer.devices=1")
    found, expected = (command.summary(run)["weights"] for run in ("run", "whole"))
    assert found == expected
    assert [*found] == ["2", "4", "6"]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO), pytest.param(4, marks=FOUR)])
def test_sums_in_one_order_end_with_the_same_bits_again_and_on_more_devices(command, ranks):
    words = ["trainer=gpu", "batch.exact_micro_size=1", "model.dropout=0.1", "strategy=ddp"]
    for run, devices in (("one", 1), ("other", ranks)):
        command.train(*words, f"trainer.devices={devices}", f"run_dir={run}")
    one, other = (command.summary(run)["weights"] for run in ("one", "other"))
    assert one == other
