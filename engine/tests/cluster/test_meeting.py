import socket
import threading
import time

import pytest

from lockstep.cluster.meeting import Absent, examine_clocks, open_meeting
from lockstep.ranks.ranks import Ranks

LIMIT = 1.0
PATIENCE = 60.0  # enough for ranks that must succeed, even on a busy machine
FIRST, SECOND = Ranks(0, 0, 2, 2), Ranks(1, 1, 2, 2)


@pytest.fixture
def port(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


@pytest.mark.usefixtures("port")
def test_a_missing_rank_is_reported_in_time():
    meeting = open_meeting(FIRST, LIMIT)
    started = time.monotonic()
    with pytest.raises(Absent, match=r"rank 1 did not arrive within 1 s"):
        meeting.gather("facts", {})
    assert time.monotonic() - started < LIMIT + 20  # torch itself waits minutes


@pytest.mark.slow
def test_a_closed_port_is_distinguished_from_another_program_s(port):
    with pytest.raises(Absent, match=rf"nothing answered at 127.0.0.1:{port} within 1 s"):
        open_meeting(SECOND, LIMIT)
    silent = socket.create_server(("127.0.0.1", port))
    with silent, pytest.raises(Absent, match="is not a torch store"):
        open_meeting(SECOND, LIMIT)


def test_a_used_port_is_reported(port):
    with socket.create_server(("", port)), pytest.raises(Absent, match=f"MASTER_PORT={port}"):
        open_meeting(FIRST, LIMIT)


@pytest.fixture
def both(port):  # noqa: ARG001 (in the environment)
    """Two ranks in one process that share one store."""
    first = open_meeting(FIRST, PATIENCE)
    return first, open_meeting(SECOND, PATIENCE)


def test_rank_zero_has_the_words_of_all_in_order(both):
    first, second = both
    assert second.gather("words", "two") == []
    assert first.gather("words", "one") == ["one", "two"]


def test_other_ranks_receive_rank_zero_s_values_and_its_stop(both):
    first, second = both
    first.tell("go", True)
    assert second.hear("go") is True
    first.limit = LIMIT
    with pytest.raises(Absent):
        first.gather("facts", {})
    started = time.monotonic()
    with pytest.raises(Absent, match="rank 0 has stopped"):
        second.hear("more")
    assert time.monotonic() - started < PATIENCE


def test_the_clocks_of_one_machine_agree(both):
    first, second = both
    thread = threading.Thread(target=second.clock_offsets)
    thread.start()
    offsets = first.clock_offsets()
    thread.join()
    assert len(offsets) == 2
    assert all(abs(offset) <= doubt for offset, doubt in offsets)


def test_a_wrong_clock_is_reported():
    finding = examine_clocks([(0.0, 0.0), (0.01, 0.02), (-90.0, 0.02)])
    assert (finding.status, finding.line) == ("warning", "rank 2 up to 90.0 s off")
    assert examine_clocks([(0.0, 0.0), (0.01, 0.02)]).status == "ok"
