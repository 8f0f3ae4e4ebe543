import gc
from itertools import pairwise

import pytest
import torch.distributed as dist
from lightning import Callback, Trainer

from lockstep_gpt.training.callbacks.step import StepCallback
from lockstep_gpt.training.lean_loop import HOOKS, LeanLoop


def broadcasts_of(run, *callbacks):
    """Return what counts the broadcasts of a fit on one of two ranks, copies of this process."""

    def count(_rank):
        Trainer.world_size = property(lambda _: 2)
        calls, broadcast = [], dist.broadcast
        dist.broadcast = lambda *args, **options: (calls.append(args), broadcast(*args, **options))
        run.fit(*callbacks)
        return len(calls)

    return count


def test_the_stock_loop_broadcasts_at_every_micro_batch_and_ours_never(new_run, on_ranks):
    # Should the first fail, Lightning needs our change to its loop no longer.
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3))) == [6, 6]
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3), LeanLoop())) == [0, 0]


class Idle(Callback):
    """Has nothing to do in a step."""


def test_the_stock_loop_calls_what_does_nothing_and_ours_never(new_run, monkeypatch):
    calls = []
    monkeypatch.setattr(Callback, "on_before_backward", lambda *_: calls.append(1))
    new_run(max_steps=3).fit(Idle())
    assert calls  # should this fail, Lightning needs our change to its hooks no longer
    calls.clear()
    idle, busy = Idle(), Busy()
    new_run(max_steps=3).fit(idle, busy, LeanLoop())
    assert not calls
    assert busy.calls == 6
    idle.on_before_backward(None, None, None)
    assert len(calls) == 1


class Busy(Callback):
    calls = 0

    def on_train_batch_start(self, *_):
        self.calls += 1


class Raises(Callback):
    """Ends a run in its third step, and keeps its Trainer."""

    def on_train_batch_end(self, trainer, *_):
        self.trainer = trainer
        if trainer.global_step == 3:
            raise ZeroDivisionError


def test_all_that_is_taken_out_of_the_loop_is_put_back_after_an_exception_too(new_run):
    raises, mine = Raises(), lambda *_: None
    raises.on_before_backward = mine  # of an instance, where a class has none
    with pytest.raises(ZeroDivisionError):
        new_run(max_steps=6).fit(raises, LeanLoop())
    trainer = raises.trainer
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    assert "profile" not in vars(trainer.profiler)
    hooked = {*HOOKS}
    assert hooked & {*vars(raises)} == {"on_before_backward"}
    assert raises.on_before_backward is mine
    assert not hooked & {*vars(trainer.lightning_module)}
    assert gc.isenabled()


class Collections(StepCallback):
    """Counts how often Python's collector has come, after each step."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, trainer, pl_module, step):  # noqa: ARG002
        garbage = []
        garbage.append(garbage)
        self.counts.append(sum(each["collections"] for each in gc.get_stats()))


@pytest.mark.usefixtures("thawed")
def test_garbage_is_collected_at_the_steps_that_are_said_and_as_ever_afterwards(new_run):
    counter = Collections()
    new_run(max_steps=6).fit(counter, LeanLoop(every=2))
    counts = counter.counts
    assert [after - before for before, after in pairwise(counts)] == [0, 1, 0, 1, 0]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
