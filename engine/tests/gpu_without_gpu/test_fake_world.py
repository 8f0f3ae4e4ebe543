"""One rank of eight over torch's fake process group: what it sends, when, and what it compiles."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch.futures import Future

from lockstep.strategies import placing as strategies

pytestmark = pytest.mark.usefixtures("eight")
SETTINGS = {"process_group_backend": None, "timeout_seconds": 60, "comm_hook": "none"}
ACCUMULATION, STEPS = 2, 3


class Sent(Callback):
    """Counts what DDP passes to its hook, and which buffers it broadcasts, by micro-batch."""

    def __init__(self, monkeypatch):
        self.bytes, self.buffers, self.batch = Counter(), Counter(), -1

        def hook(_state, bucket):
            self.bytes[self.batch] += bucket.buffer().nbytes
            done = Future()
            done.set_result(bucket.buffer())
            return done

        def register(strategy):
            strategy.model.register_comm_hook(None, hook)

        monkeypatch.setattr(strategies.DDPStrategy, "_register_ddp_hooks", register)
        broadcast = dist._broadcast_coalesced

        def broadcast_and_count(group, tensors, *rest):
            self.buffers[self.batch] += sum(each.nbytes for each in tensors)
            return broadcast(group, tensors, *rest)

        monkeypatch.setattr(dist, "_broadcast_coalesced", broadcast_and_count)

    def on_train_batch_start(self, *given):
        self.batch = given[3]


def test_ddp_sends_each_gradient_once_a_step_in_its_last_micro_batch(new_run, monkeypatch):
    run, sent = new_run(max_steps=STEPS), Sent(monkeypatch)
    strategy = strategies.ddp(**SETTINGS, gradient_as_bucket_view=True)
    run.fit(sent, strategy=strategy, devices=8)
    size = sum(each.nbytes for each in run.module.model.parameters())
    last = [step * ACCUMULATION + ACCUMULATION - 1 for step in range(STEPS)]
    # The first step arranges the buckets, and sends its gradients again from where they then are.
    assert sent.bytes == {**dict.fromkeys(last, size), last[0]: 2 * size}
    assert run.batch.accumulation == ACCUMULATION


@pytest.mark.parametrize("state", [False, True], ids=["constants", "batchnorm"])
def test_ddp_broadcasts_buffers_only_if_they_are_state(new_run, monkeypatch, state):
    shape = {"architecture": "modern"}
    run, sent = new_run(max_steps=STEPS, model=shape), Sent(monkeypatch)
    assert [*run.module.model.buffers()]  # cosines and sines
    if state:
        run.module.statistics = torch.nn.BatchNorm1d(3)
        run.module.statistics.requires_grad_(False)
    run.fit(sent, strategy=strategies.ddp(**SETTINGS), devices=8)
    assert bool(sum(count for batch, count in sent.buffers.items() if batch >= 0)) is state


class Mode(Callback):
    """Records whether validation is in inference mode, and whether it computes gradients."""

    def on_validation_batch_start(self, *_):
        self.modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The '.*_dataloader' does not have")
def test_validation_has_no_other_mode_than_over_gloo(new_run):
    run, mode = new_run(max_steps=STEPS), Mode()
    assert dist.get_backend() == "fake"  # to Lightning, the same as NCCL
    trainer = Trainer(
        accelerator="cpu",
        devices=8,
        strategy=strategies.ddp(**SETTINGS),
        callbacks=[mode],
        logger=False,
        max_steps=STEPS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        inference_mode=False,  # as in configs/trainer
        use_distributed_sampler=False,
    )
    trainer.validate(run.module, run.data, verbose=False)
    assert mode.modes == (False, False)
