"""The state in memory: when it is kept, and what the receipt says."""

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lockstep_gpt.distributed.ranks import Ranks
from lockstep_gpt.run.callbacks.memory import StateInMemory
from lockstep_gpt.run.callbacks.stopping import GracefulStop
from lockstep_gpt.run.callbacks.weight_hashes import WeightHashes
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.memory import files
from lockstep_gpt.run.memory.files import identity_of, states_in
from lockstep_gpt.run.memory.states import read_state
from lockstep_gpt.run.memory.writer import MemoryWriter


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A run whose shared memory is a folder on disk."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.create({"seed": 1})
    return run


@pytest.fixture
def kept(new_run, directory):
    """Return a function that makes a run, and what keeps its state."""

    def make(memory, ranks=None, **settings):
        run = new_run(checkpoint={"memory": memory, "every": 3}, **settings)
        writer = MemoryWriter(identity_of(directory))
        checkpoints = run.checkpoints(directory.checkpoints)
        hashes = WeightHashes()
        hashes.weights = dict.fromkeys(range(9), "known")
        lost = run.config.loses_error
        state = StateInMemory(checkpoints, hashes, writer, every=memory, loses_error=lost)
        state.ranks = ranks or Ranks()
        state.prepare(SingleDeviceStrategy(), 1 << 16, None)
        return run, checkpoints, state

    return make


TWO = Ranks(0, 0, 2, 2)


@pytest.mark.parametrize(("memory", "ranks"), [("auto", Ranks()), (False, TWO)])
def test_nobody_hears_of_memory_that_nobody_asked_for(kept, memory, ranks):
    _, _, state = kept(memory, ranks)
    assert state.receipt_lines() == {}
    assert not state.turns.is_on


@pytest.mark.parametrize(("memory", "lines"), [("auto", 0), (3, 1)])
def test_a_system_without_shared_memory_says_so_only_if_asked(kept, directory, memory, lines):
    files.SHARED_MEMORY.rmdir()
    assert directory.token()
    _, _, state = kept(memory, TWO)
    assert len(state.receipt_lines()) == lines
    assert not state.turns.is_on


def test_powersgd_has_no_state_in_memory(kept):
    _, _, state = kept("auto", TWO, strategy={"comm_hook": "powersgd"})
    assert state.receipt_lines() == {"memory": "off: no state has powersgd's accumulated error"}


def test_the_state_of_a_step_knows_the_checkpoint_of_that_step(kept, directory):
    """After a restart, it is among the best, as without a restart."""
    run, checkpoints, state = kept(3, val_every=3, max_steps=7)
    run.fit(GracefulStop(checkpoints, state.turns), checkpoints, state)
    newest, older = states_in(identity_of(directory))
    assert (newest.step, older.step) == (6, 3)
    losses = read_state(older)["callbacks"][checkpoints.state_key]["losses"]
    assert [*losses] == [3]
    assert run.config.checkpoint.memory == 3
