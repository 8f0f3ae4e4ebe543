"""StateInMemory in a plain Trainer.

It needs Checkpoints and GracefulStop, in whose vote the ranks agree on when to keep a state.
"""

import threading

import lightning
import pytest

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.callbacks.stopping import GracefulStop
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.reading import checkpoints_in, step_of
from lockstep.errors import UserError
from lockstep.memory import files
from lockstep.memory.callback import StateInMemory
from lockstep.memory.files import HEADER_BYTES, identity_of, states_in
from lockstep.run.directory import RunDirectory
from lockstep.run.run import Run


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A run whose shared memory is a folder on disk."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.create({})
    return run


class Crash(lightning.Callback):
    """Ends a rank after a step, as a fault would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise RuntimeError("crashed")


class Overwrite(lightning.Callback):
    """Fills the file of a state with other numbers, as a later state does."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, *_):
        with self.path.open("r+b") as file:
            size = self.path.stat().st_size - HEADER_BYTES
            file.seek(HEADER_BYTES)
            file.write(b"\x7f" * size)


def fit(foreign, directory, world_size, *callbacks, resumed_at=0, **settings):
    """Train as one rank, from the run's newest state on; return the hash of the weights."""
    module = foreign.module()
    run = Run(directory.path, {}, timeout=60)
    checkpoints = Checkpoints(run, every=3, keep_best=0)
    memory = StateInMemory(run, every=2)
    parts = [MicroBatchSeeds(7), GracefulStop(timeout=60), checkpoints, memory, *callbacks]
    spread = {"world_size": world_size, "accumulation": 2}
    begin = {"ckpt_path": run.checkpoint, "start": resumed_at}
    foreign.train(module, *parts, plugins=run.plugins, **spread, **begin, **settings)
    return foreign.digest(module)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_continues_from_memory_with_equal_bits(
    foreign, on_each, tmp_path, directory, world_size
):
    """A state newer than any checkpoint is kept, and the run ends with the bits of a whole one."""
    other = RunDirectory(tmp_path / "whole")
    other.create({})
    whole = on_each(world_size, lambda _rank: fit(foreign, other, world_size))

    def crash(_rank):
        with pytest.raises(RuntimeError, match="crashed"):
            fit(foreign, directory, world_size, Crash(5))

    on_each(world_size, crash)
    assert [step_of(path) for path in checkpoints_in(directory.checkpoints)] == [3]
    newest, *_ = states_in(identity_of(directory))
    assert newest.step == 4
    rest = on_each(world_size, lambda _rank: fit(foreign, directory, world_size, resumed_at=4))
    assert rest == whole


def test_a_resumed_run_does_not_share_numbers_with_the_file(foreign, tmp_path, directory):
    """Later states overwrite the file; the optimizer's moments stay those of the run."""
    other = RunDirectory(tmp_path / "whole")
    other.create({})
    whole = fit(foreign, other, 1)
    with pytest.raises(RuntimeError, match="crashed"):
        fit(foreign, directory, 1, Crash(5))
    newest, *_ = states_in(identity_of(directory))
    overwrite = Overwrite(newest.path)
    assert fit(foreign, directory, 1, overwrite, resumed_at=4) == whole


def test_a_trainer_that_fails_leaves_no_thread(foreign, directory):
    """Another fit of the same process may take its place."""
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="crashed"):
        fit(foreign, directory, 1, Crash(5))
    assert threading.active_count() == threads


def test_what_it_needs_is_named(foreign, directory):
    """A Trainer without the callback in whose votes ranks agree would never keep a state."""
    run = Run(directory.path, {})
    parts = [Checkpoints(run, every=3, keep_best=0), StateInMemory(run, every=2)]
    with pytest.raises(UserError, match=r"needs lockstep.GracefulStop among the Trainer's callbac"):
        foreign.train(foreign.module(), *parts, plugins=run.plugins)


def test_a_dry_run_keeps_none(foreign, directory):
    """Lightning's `fast_dev_run` leaves nothing behind."""
    fit(foreign, directory, 1, fast_dev_run=True)
    assert states_in(identity_of(directory)) == []


@pytest.mark.parametrize("every", [0, -1, True, "often", 1.5])
def test_other_intervals_are_refused(directory, every):
    """One line says what is possible."""
    with pytest.raises(UserError, match=r"^memory=\S+ must be auto, false, or a number of steps"):
        StateInMemory(Run(directory.path, {}), every=every)
