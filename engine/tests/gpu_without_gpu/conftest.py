"""Miniature runs on real ranks or on simulated ones."""

from __future__ import annotations

import importlib
import logging
import os

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch._dynamo.backends.debugging import aot_eager
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import functional
from lockstep.strategies import placing as strategies

SETTINGS = {"process_group_backend": None, "timeout_seconds": 60, "comm_hook": "none"}


def as_rank(rank: int, size: int) -> dict[str, str]:
    """Return the environment that torchrun would give a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    return {name: str(value) for name, value in {**numbers, **place}.items()} | {
        "TORCHELASTIC_RUN_ID": "kit"
    }


class Losses(Callback):
    """Records the loss of each micro-batch and of each validation."""

    def __init__(self):
        self.all: list[float] = []

    def on_train_batch_end(self, *given):
        self.all.append(float(given[2]["loss"]))

    def on_validation_end(self, trainer, pl_module):
        self.all.append(float(trainer.callback_metrics["val/loss"]))


@pytest.fixture
def losses_on_two(on_ranks, graphs):
    """Fit a run on two gloo ranks; return each rank's losses, and where it built its graphs."""

    def fit(make_run, make_strategy, *callbacks):
        def rank(number):
            os.environ.update(as_rank(number, 2))
            seen = Losses()
            run = make_run()
            run.fit(graphs, seen, *callbacks, strategy=make_strategy(), devices=2)
            return seen.all, graphs.made

        return zip(*on_ranks(2, rank), strict=True)

    return fit


@pytest.fixture
def compare_compiled(new_run, losses_on_two, monkeypatch):
    """Check that two compiled ranks have the losses of eager ones, and build each graph once."""

    def compare(architecture, chunked, recomputed):
        monkeypatch.setattr(functional, "MANY_LOGITS", 0 if chunked else 1 << 60)
        shape = {"architecture": architecture, "activation_checkpointing": recomputed}

        def losses(compiled):
            return losses_on_two(
                lambda: new_run(max_steps=4, model=shape, compile=compiled),
                lambda: strategies.ddp(**SETTINGS, bucket_cap_mb=25),
            )

        (eager, _), (compiled, made) = losses(False), losses(True)
        # The loss in chunks is a separate Function, before which a graph ends.
        once = [("train", 0)] * (1 + chunked) + [("validate", 0)] * (1 + chunked)
        assert made == (once, once)
        for ours, theirs in zip(compiled, eager, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)

    return compare


@pytest.fixture
def rank_environment():
    return as_rank


@pytest.fixture
def eight(monkeypatch):
    """Make this process rank 0 of eight; collectives send nothing and finish at once."""
    for name, value in as_rank(0, 8).items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


class Graphs(Callback):
    """Replaces Inductor in `torch.compile`; records the micro-batch that built each graph."""

    def __init__(self):
        self.made: list[tuple[str, int]] = []
        self.place = ("before", 0)

    def compile(self, graph, inputs):
        self.made.append(self.place)
        return aot_eager(graph, inputs)

    def on_train_batch_start(self, *given):
        self.place = ("train", given[3])

    def on_validation_batch_start(self, *given):
        self.place = ("validate", given[3])


@pytest.fixture
def graphs(monkeypatch):
    """Everything compiled from now on, without the minutes that a compiler takes."""
    importlib.import_module("torch._inductor.pattern_matcher")  # else in each rank, a fork
    seen = Graphs()
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *of, **settings: compiler(*of, **settings, backend=seen.compile)
    )
    # With a listener such as pytest, torch logs each graph several times.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "level", logging.CRITICAL)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()
