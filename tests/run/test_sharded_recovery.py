"""Killed ranks with shards continue from those in memory."""

import pytest
import torch

from lockstep_gpt.run.checkpoint import read_checkpoint

SHARDED = ("trainer=cpu", "strategy=fsdp2", "checkpoint.memory=4", "checkpoint.every=20")
KILL = """
import os, signal, lightning
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        step, victims = trainer.global_step, {victims}
        name = f"killed-{{step}}-{{trainer.global_rank}}"
        if trainer.global_rank in victims.get(step, ()) and not os.path.exists(name):
            open(name, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def content(folder, step=20):
    return read_checkpoint(folder / f"checkpoints/step={step:06d}.ckpt")


def assert_same_bits(ours, theirs):
    """Compare everything but the time and place of two checkpoints."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same_bits(ours[name], theirs[name])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same_bits(our, their)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)


@pytest.fixture
def killed(command):
    """Train on some ranks, of which several are killed; return what was printed."""

    def train(victims, *words):
        (command.folder / "killer.py").write_text(KILL.format(victims=victims))
        kill = ("+callbacks.kill._target_=killer.Kill", "run_dir=hit")
        return command.train(*SHARDED, *words, *kill, PYTHONPATH=str(command.folder))

    return train


KINDS = {
    "adamw": ("trainer.devices=2", "model.dropout=0.1"),
    "muon": ("trainer.devices=2", "optim=muon"),
    "parts": ("trainer.devices=2", "strategy.save_parts=true"),
    "three": ("trainer.devices=3", "batch.global_size=9"),
    "tensor": ("trainer.devices=2", "strategy.tensor_parallel=2"),
    "tensor-muon": ("trainer.devices=4", "strategy.tensor_parallel=2", "optim=muon"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_ranks_continue_from_the_shards_in_memory(command, killed, kind):
    words = KINDS[kind]
    command.train(*SHARDED, *words, "run_dir=whole", "verbosity=quiet")
    ranks = int(words[0][-1])
    hit = killed({7: [1], 14: [*range(1, ranks)]}, *words)
    assert "continues from step 4, kept in memory" in hit.stdout
    assert "continues from step 12, kept in memory" in hit.stdout
    ours, theirs = content(command.folder / "hit"), content(command.folder / "whole")
    for name in ("state_dict", "optimizer_states", "loops", "samples"):
        assert_same_bits(ours[name], theirs[name])
