"""The memory left for states: that of the machine, or less in a container."""

import pytest

from lockstep.memory import room
from lockstep.memory.files import SharedMemoryError
from lockstep.memory.slots import Slot


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Files with what a system says of its memory."""
    monkeypatch.setattr(room, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CONTAINER", tmp_path)
    return tmp_path


def test_a_machine_has_what_is_available(system):
    (system / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 100 kB\n")
    assert room.bytes_left() == 102_400


def test_a_container_has_what_its_limit_leaves_besides_cached_files(system):
    (system / "meminfo").write_text("MemAvailable: 100 kB\n")
    (system / "memory.max").write_text("50000\n")
    (system / "memory.current").write_text("40000\n")
    (system / "memory.stat").write_text("anon 20000\nfile 15000\nshmem 5000\n")
    assert room.bytes_left() == 20_000
    (system / "memory.max").write_text("max\n")
    assert room.bytes_left() == 102_400


@pytest.mark.usefixtures("system")
def test_a_system_that_says_nothing_has_no_limit():
    assert room.bytes_left() > 1 << 60


def test_a_state_that_would_not_fit_is_refused(system):
    (system / "meminfo").write_text("MemAvailable: 100 kB\n")
    with pytest.raises(SharedMemoryError, match=r"needs 2,\d+,\d+ bytes more, but .* 102,400 left"):
        Slot(system / "state.0").reserve(2_000_000)
