"""Real runs that end with equal bits."""

import pytest
import torch

GPUS = torch.cuda.device_count()
TWO = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
KILL = """
import os, signal, lightning
from lockstep.muon import owned as owned_matrices
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        is_hit = (trainer.global_step, trainer.global_rank) == (3, 3)
        if is_hit and not os.path.exists("hit"):
            open("hit", "w").close()
            owned_matrices.gather_stacks = die
"""
FOUR = pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_threads_on_other_numbers_of_devices(command):
    words = ["batch.exact_micro_size=2", "schedule.decay=constant", "schedule.warmup=0"]
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


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_muon_keeps_its_bits_when_ranks_share_it_and_one_dies_in_the_exchange(command):
    (command.folder / "kill.py").write_text(KILL)
    model = ["optim=muon", "model=modern_nano"]
    rates = ["schedule.decay=constant", "schedule.warmup=0"]
    words = [*model, *rates, "batch.exact_micro_size=2", "checkpoint.every=2", "val_every=2"]
    command.train(*words, "run_dir=whole", "max_steps=6")
    four = ["trainer=cpu", "trainer.devices=4", "strategy=ddp", "max_steps=4"]
    kill = ["+callbacks.kill._target_=kill.Kill", "run_dir=run"]
    hit = command.train(*words, *four, *kill, PYTHONPATH=str(command.folder))
    assert "rank 3 was killed by SIGKILL; restarting all ranks (1 of 3)" in hit.stderr
    assert (command.folder / "run/checkpoints/step=000004.ckpt").exists()
    two = ["trainer.devices=2", "max_steps=6"]
    command("train", "run_dir=run", "resume=auto", *two, PYTHONPATH=str(command.folder))
    whole, run = (command.summary(run)["weights"] for run in ("whole", "run"))
    assert run == whole
    files = [command.folder / name / "checkpoints/step=000006.ckpt" for name in ("whole", "run")]
    states = [torch.load(file, weights_only=True)["optimizer_states"][0] for file in files]
    one, shared = ([*tensors_in(state["state"])] for state in states)
    assert [name for name, _ in shared] == [name for name, _ in one]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, shared, strict=True))


def tensors_in(states):
    """Return the number, the name, and the tensor of each state, in the order of the file."""
    return [
        ((number, name), tensor)
        for number, state in states.items()
        for name, tensor in state.items()
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO), pytest.param(4, marks=FOUR)])
def test_sums_in_one_order_end_with_the_same_bits_again_and_on_more_devices(command, ranks):
    words = ["trainer=gpu", "batch.exact_micro_size=1", "model.dropout=0.1", "strategy=ddp"]
    for run, devices in (("one", 1), ("other", ranks)):
        command.train(*words, f"trainer.devices={devices}", f"run_dir={run}")
    one, other = (command.summary(run)["weights"] for run in ("one", "other"))
    assert one == other
