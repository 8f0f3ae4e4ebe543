"""The bytes that gloo really sends: those that a rank writes to its sockets in training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lightning import Callback
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from lockstep.strategies import placing as strategies

DDP = {"process_group_backend": None, "timeout_seconds": 60, "gradient_as_bucket_view": True}
COUNTS = Path("/proc/self/io")
STEPS = 4
pytestmark = pytest.mark.skipif(not COUNTS.exists(), reason="no /proc/self/io")


def written() -> int:
    counts = dict(line.split(": ") for line in COUNTS.read_text().splitlines())
    return int(counts["wchar"])


class Written(Callback):
    """Counts over two steps: in the first, DDP arranges its buckets."""

    def on_train_batch_start(self, trainer, _module, _batch, batch_idx):
        if trainer.global_step == STEPS - 2 and batch_idx % 2:
            self.before = written()

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == STEPS:
            self.bytes = written() - self.before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "share"),
    [
        ("none", 1.0),
        ("fp16", 0.5),
        ("powersgd", 0.0425),
    ],
)
def test_the_hook_that_compresses_gradients_does_so_on_cpus_too(
    on_ranks, new_run, rank_environment, monkeypatch, hook, share
):
    # It would start after 1,000 steps, more than this test has.
    state = powerSGD_hook.PowerSGDState
    monkeypatch.setattr(
        powerSGD_hook, "PowerSGDState", lambda **_: state(None, start_powerSGD_iter=2)
    )

    def rank(number):
        os.environ.update(rank_environment(number, 2))
        run, counted = new_run(max_steps=STEPS, val_every=10, model={"n_embd": 64}), Written()
        run.fit(counted, strategy=strategies.ddp(**DDP, comm_hook=hook), devices=2)
        gradients = sum(each.nbytes for each in run.module.model.parameters())
        return counted.bytes / (2 * gradients), [
            each.sum().item() for each in run.module.parameters()
        ]

    (first, weights), (second, others) = on_ranks(2, rank)
    for each in (first, second):  # two ranks: each sends its half, and the sum of the other half
        assert each == pytest.approx(share, rel=0.1)
    assert weights == others
