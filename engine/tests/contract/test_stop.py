"""GracefulStop in a plain Trainer; it needs Checkpoints, which save."""

import os
import signal

import lightning
import pytest

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.callbacks.stopping import GracefulStop
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.reading import checkpoint_path, checkpoints_in, step_of
from lockstep.processes import STOP_SIGNALS
from lockstep.stop_signals import Stopped

slow = pytest.mark.slow


class SignalOne(lightning.Callback):
    """Sends one rank a signal in the middle of a step."""

    def __init__(self, rank, step, signum):
        self.place, self.signum = (rank, step), signum

    def on_before_backward(self, trainer, *_):
        if (trainer.global_rank, trainer.global_step + 1) == self.place:
            os.kill(os.getpid(), self.signum)


def handlers():
    return [signal.getsignal(signum) for signum in STOP_SIGNALS]


@pytest.mark.parametrize(
    ("spread", "rank", "signum"),
    [
        ((1, 2), 0, signal.SIGTERM),
        ((2, 2), 1, signal.SIGTERM),
        pytest.param((2, 1), 0, signal.SIGINT, marks=slow),
        pytest.param((3, 2), 2, signal.SIGTERM, marks=slow),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_saved_step(
    foreign, on_each, tmp_path, spread, rank, signum
):
    """The run is saved and can be continued; signals are handled as before afterward."""
    world_size, accumulation = spread
    spread = {"world_size": world_size, "accumulation": accumulation}

    def stop(_rank):
        before = handlers()
        module, checkpoints = foreign.module(), Checkpoints(tmp_path / "run", every=99, keep_best=0)
        callbacks = [MicroBatchSeeds(7), GracefulStop(checkpoints, timeout=60), checkpoints]
        with pytest.raises(Stopped) as stopped:
            foreign.train(module, SignalOne(rank, 3, signum), *callbacks, **spread)
        assert handlers() == before
        return stopped.value.signum, stopped.value.saved, module.trainer.global_step

    results = on_each(world_size, stop)
    # One rank alone stops at once; several agree while the next step goes on.
    step = 3 if world_size == 1 else 4
    assert results == [(signum, True, step)] * world_size
    assert [step_of(path) for path in checkpoints_in(tmp_path / "run")] == [step]

    def rest(_rank, **settings):
        module = foreign.module()
        checkpoints = Checkpoints(tmp_path / "rest", every=None, keep_best=0)
        foreign.train(module, MicroBatchSeeds(7), checkpoints, **spread, **settings)
        return foreign.digest(module)

    path = checkpoint_path(tmp_path / "run", step)
    whole = on_each(world_size, rest)
    assert on_each(world_size, lambda rank: rest(rank, ckpt_path=path, start=step)) == whole


class EndsOn(lightning.Callback):
    """Sets `trainer.should_stop` on some ranks, from a micro-batch or from a validation on."""

    def __init__(self, *ranks, batch=None):
        self.ranks, self.batch = ranks, batch

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, batch_idx):
        if self.batch is not None and batch_idx >= self.batch:
            self.end(trainer)

    def on_validation_end(self, trainer, *_):
        self.end(trainer)

    def end(self, trainer):
        if trainer.global_rank in self.ranks:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("spread", "ends", "batch", "last"),
    [
        ((1, 1), (0,), 1, 2),
        ((1, 2), (0,), 4, 3),  # in the first micro-batch of step 3
        ((2, 1), (0, 1), 1, 2),  # as on one rank
        ((2, 1), (1,), 1, 3),
        ((2, 2), (0,), 3, 3),
        ((2, 1), (1,), None, 4),  # in the validation after step 4
    ],
)
def test_ranks_end_after_the_same_step_if_one_of_them_should_stop(
    foreign, on_each, spread, ends, batch, last
):
    world_size, accumulation = spread
    spread = {"world_size": world_size, "accumulation": accumulation}
    if batch is None:
        spread["validate_every"] = 4

    def steps(_rank):
        callbacks = [EndsOn(*ends, batch=batch), GracefulStop(timeout=60)]
        return foreign.train(foreign.module(), *callbacks, **spread).global_step

    assert on_each(world_size, steps) == [last] * world_size
