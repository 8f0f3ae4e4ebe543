"""The state in memory: when it is kept, and what the receipt says."""

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lockstep.callbacks.stopping import GracefulStop
from lockstep.checkpoints.callback import Checkpoints
from lockstep.memory import files
from lockstep.memory.callback import StateInMemory, bytes_of_state
from lockstep.memory.files import identity_of, states_in
from lockstep.memory.states import read_state
from lockstep.memory.writer import MemoryWriter
from lockstep.ranks.ranks import Ranks
from lockstep.run.directory import RunDirectory
from lockstep.run.run import Run


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A run whose shared memory is a folder on disk."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.create({"seed": 1})
    return run


@pytest.fixture
def kept(directory):
    """Return a function that makes what keeps the state of a run on some ranks."""

    def make(memory, ranks=None, loses_error=False):
        run = Run(directory.path, {}, ranks=ranks or Ranks())
        run.hashes.weights = dict.fromkeys(range(9), "known")
        state = StateInMemory(run, every=memory)
        state.writer = MemoryWriter(identity_of(directory)) if memory else None
        strategy = SingleDeviceStrategy()
        strategy.loses_error = loses_error
        state.prepare(strategy, 1 << 16)
        return state

    return make


TWO = Ranks(0, 0, 2, 2)


@pytest.mark.parametrize(("memory", "ranks"), [("auto", Ranks()), (False, TWO)])
def test_nobody_hears_of_memory_that_nobody_asked_for(kept, memory, ranks):
    state = kept(memory, ranks)
    assert state.line is None
    assert not state.turns.is_on


@pytest.mark.parametrize(("memory", "lines"), [("auto", 0), (3, 1)])
def test_a_system_without_shared_memory_says_so_only_if_asked(kept, directory, memory, lines):
    files.SHARED_MEMORY.rmdir()
    assert directory.token()
    state = kept(memory, TWO)
    assert bool(state.line) == lines
    assert not state.turns.is_on


def test_powersgd_has_no_state_in_memory(kept):
    line = kept("auto", TWO, loses_error=True).line
    assert line == "off: no state has powersgd's accumulated error"


def test_a_state_in_memory_leaves_out_the_arguments_that_checkpoints_leave_out(new_run, directory):
    """`save_hyperparameters` keeps functions, and numbers of NumPy."""
    ours = Run(directory.path, {})
    parts = [GracefulStop(), Checkpoints(ours), StateInMemory(ours, every=2)]
    (disk,) = ours.plugins
    run = new_run(max_steps=4)
    run.module.save_hyperparameters({"act": torch.relu, "size": np.float32(2), "lr": 1})
    run.fit(*parts, io=disk)
    newest, *_ = states_in(identity_of(directory))
    assert read_state(newest)["hyper_parameters"] == {"lr": 1}


def test_the_state_of_a_step_knows_the_checkpoint_of_that_step(new_run, directory, caplog):
    """After a restart, it is among the best, as without a restart."""
    ours = Run(directory.path, {})
    checkpoints = Checkpoints(ours, every=3)
    state = StateInMemory(ours, every=3)
    (disk,) = ours.plugins
    run = new_run(val_every=3, max_steps=7)
    with caplog.at_level("INFO"):
        run.fit(GracefulStop(), checkpoints, state, io=disk)
    newest, older = states_in(identity_of(directory))
    assert (newest.step, older.step) == (6, 3)
    losses = read_state(older)["callbacks"][checkpoints.state_key]["losses"]
    assert [*losses] == [3]
    size = bytes_of_state(run.module)
    line = (
        f"  memory     the newest state, every 3 steps; 2 x {size / 1e6:,.1f} MB of each machine's"
    )
    assert caplog.text.count(line) == 1
    assert older.size == pytest.approx(size, rel=0.5)
