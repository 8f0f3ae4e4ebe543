"""Slots in shared memory: what is written comes back, and half a state is none."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.memory import files
from lockstep.memory.files import (
    HEADER_BYTES,
    Identity,
    SharedMemoryError,
    make_folder,
    remove_states,
    states_in,
)
from lockstep.memory.slots import Layout, Slot, SlotPair
from lockstep.memory.states import is_intact, read_state


@pytest.fixture
def identity(tmp_path, monkeypatch):
    """A run whose shared memory is a folder on disk: also systems without /dev/shm have one."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    return Identity.of(tmp_path / "run", "0123")


def write(slot: Slot, identity: Identity, step: int, state: Any) -> None:
    """Write a complete state."""
    layout = Layout(state)
    slot.fill(layout)
    slot.seal(layout, identity, step)


def state_of(value: float) -> dict[str, Any]:
    """Return a state with what checkpoints have."""
    weight = torch.full((300, 70), value)
    weights = OrderedDict(weight=weight, tied=weight, turned=weight.T, part=weight[3:5, 2:])
    vars(weights)["_metadata"] = {"": {"version": 1}}
    moments = {0: {"step": torch.tensor(value), "exp_avg": weight.bfloat16()}, 1: {}}
    return {
        "state_dict": weights,
        "optimizer_states": [{"state": moments, "param_groups": [{"betas": (0.9, 0.95)}]}],
        "empty": torch.empty(0, 3),
        "flags": (torch.tensor([True, False]), None, "text"),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [*found] == [*expected]
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list | tuple):
        for value, other in zip(found, expected, strict=True):
            assert_same(value, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert found == expected


def test_a_state_comes_back_as_it_was(identity):
    slot = Slot(make_folder(identity) / "state.0")
    state = state_of(1.5)
    write(slot, identity, 7, state)
    (kept,) = states_in(identity)
    assert kept.step == 7
    assert is_intact(kept)
    found = read_state(kept)
    assert_same(found, state)
    assert vars(found["state_dict"])["_metadata"] == {"": {"version": 1}}
    assert found["state_dict"]["turned"].stride() == state["state_dict"]["turned"].stride()
    assert found["state_dict"]["tied"].data_ptr() == found["state_dict"]["weight"].data_ptr()


def test_a_state_is_that_of_its_time(identity):
    """Training changes containers and tensors while the state is completed in the background."""
    state: dict[str, Any] = {"losses": {1: 2.0}, "seen": {3}, "weight": torch.zeros(5)}
    slot = Slot(make_folder(identity) / "state.0")
    layout = Layout(state)
    slot.fill(layout)
    state["losses"][2] = 1.0
    state["seen"].add(4)
    state["weight"].fill_(1.0)
    slot.seal(layout, identity, 1)
    (kept,) = states_in(identity)
    assert_same(read_state(kept), {"losses": {1: 2.0}, "seen": {3}, "weight": torch.zeros(5)})


def test_half_a_state_is_none(identity):
    pair = SlotPair(make_folder(identity), "state")
    pair.reserve(1 << 16)
    write(pair.next_slot(), identity, 1, state_of(1.0))
    write(pair.next_slot(), identity, 2, state_of(2.0))
    pair.next_slot().fill(Layout(state_of(3.0)))  # a kill comes before it is sealed
    (kept,) = states_in(identity)
    assert kept.step == 2
    assert_same(read_state(kept), state_of(2.0))


@pytest.mark.parametrize("place", [0, HEADER_BYTES + 5000, -100])
def test_a_changed_byte_is_seen(identity, place):
    slot = Slot(make_folder(identity) / "state.0")
    write(slot, identity, 1, state_of(1.0))
    (kept,) = states_in(identity)
    end = HEADER_BYTES + kept.header.size
    with kept.path.open("r+b") as file:
        file.seek(place % end)
        byte = file.read(1)
        file.seek(place % end)
        file.write(bytes([byte[0] ^ 4]))
    assert not any(map(is_intact, states_in(identity)))


def test_a_restarted_writer_keeps_what_the_run_continues_from(identity):
    """A reader may still have views of it, so it is never overwritten."""
    folder = make_folder(identity)
    first = SlotPair(folder, "state")
    write(first.next_slot(), identity, 1, state_of(1.0))
    write(first.next_slot(), identity, 2, state_of(2.0))
    newest = states_in(identity)[0]
    views = read_state(newest)
    second = SlotPair(folder, "state", kept=newest.path)
    second.reserve(1 << 20)
    assert [state.step for state in states_in(identity)] == [2]
    for step in (3, 4, 5):
        write(second.next_slot(), identity, step, state_of(float(step)))
    assert [state.step for state in states_in(identity)] == [5, 4]
    assert_same(views, state_of(2.0))


def test_a_state_is_of_one_run_in_one_place_since_one_boot(identity, tmp_path, monkeypatch):
    write(Slot(make_folder(identity) / "state.0"), identity, 1, state_of(1.0))
    (tmp_path / "copy").mkdir()
    assert states_in(Identity.of(tmp_path / "copy", identity.token)) == []
    assert states_in(Identity.of(tmp_path / "run", "4567")) == []
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(files, "BOOT_ID", boot)
    assert states_in(Identity.of(tmp_path / "run", identity.token)) == []


def test_only_the_user_can_open_a_state(identity):
    folder = make_folder(identity)
    write(Slot(folder / "state.0"), identity, 1, state_of(1.0))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "state.0").stat().st_mode & 0o777 == 0o600
    folder.chmod(0o755)
    with pytest.raises(SharedMemoryError, match="is open to other users"):
        states_in(identity)
    remove_states(identity)
    assert states_in(identity) == []


def test_a_state_is_loaded_without_running_code(identity, tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    slot = Slot(make_folder(identity) / "state.0")
    layout = Layout({})
    slot.fill(layout)
    layout.containers = {"code": Code()}
    slot.seal(layout, identity, 1)
    (kept,) = states_in(identity)
    with pytest.raises(SharedMemoryError, match="cannot be read"):
        read_state(kept)
    assert not (tmp_path / "made").exists()


def test_a_full_memory_is_one_line_and_no_signal(identity, monkeypatch):
    def refuse(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    slot = Slot(make_folder(identity) / "state.0")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SharedMemoryError, match=r"no room for .* \(No space left on device;"):
        slot.reserve(1 << 20)


def test_a_removed_file_is_noticed(identity):
    path: Path = make_folder(identity) / "state.0"
    slot = Slot(path)
    write(slot, identity, 1, state_of(1.0))
    remove_states(identity)
    with pytest.raises(SharedMemoryError, match="was removed"):
        slot.fill(Layout(state_of(2.0)))


def test_a_folder_that_another_user_could_replace_is_not_used(identity, tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    identity.folder.symlink_to(tmp_path / "theirs")
    for look in (make_folder, states_in):
        with pytest.raises(SharedMemoryError, match="belongs to another user"):
            look(identity)
