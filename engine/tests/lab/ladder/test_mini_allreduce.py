"""An all-reduce with only sockets, and the links that it needs."""

import re
import socket
import threading

import numpy as np
import pytest

LINE = "python lab/ladder/mini_allreduce.py"
pytestmark = pytest.mark.usefixtures("modules")


@pytest.fixture
def connected():
    """Two ends of one connection, with a timeout of half a second."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(0.5)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def link(connected, monkeypatch):
    from mini_allreduce import Link

    # This kind of pair isn't a TCP connection; it has no packets to delay.
    monkeypatch.setattr(socket, "IPPROTO_TCP", socket.SOL_SOCKET)
    monkeypatch.setattr(socket, "TCP_NODELAY", socket.SO_KEEPALIVE)
    return Link(connected[0], peer=1)


def test_all_ways_end_with_the_sum_on_every_rank(shown):
    rows = re.findall(r"^ +\d  (\[.+)$", shown(LINE), flags=re.MULTILINE)
    assert len(rows) == 4
    assert all(row.count("[10, 20, 30]") == 3 for row in rows)
    assert "equal to gloo's: True" in shown(LINE)


def test_links_carry_the_bytes_of_the_formulas(shown):
    lines = re.findall(r" (\d[\d,]*)   \S.* = ([\d,]+)$", shown(LINE), flags=re.MULTILINE)
    assert len(lines) == 8
    assert all(carried == formula for carried, formula in lines)


def test_a_missing_rank_is_named_in_time(python, ladder):
    words = ["--ranks=3", "--missing=2", "--timeout=1", "--size=10"]
    error = python(ladder / "mini_allreduce.py", *words, status=1).stderr
    assert "rank 0: rank 2 did not connect within 1 s" in error
    assert "Traceback" not in error


def test_a_link_waits_until_all_bytes_are_there(link, connected):
    def in_pieces():
        for piece in (b"ab", b"cd", b"ef"):
            connected[1].send(piece)

    thread = threading.Thread(target=in_pieces)
    thread.start()
    assert link.receive(6) == b"abcdef"
    assert link.carried == 6
    thread.join()


def test_a_silent_and_a_vanished_peer_are_distinguished(link, connected):
    from mini_allreduce import LostPeer

    with pytest.raises(LostPeer, match="rank 1 sent nothing in time"):
        link.receive(1)
    connected[1].close()
    with pytest.raises(LostPeer, match="rank 1 closed the connection"):
        link.receive(1)


@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (3, 7), (5, 100_000)])
def test_a_ring_sums_vectors_that_do_not_divide_and_such_as_fill_buffers(ranks, size):
    from mini_allreduce import around_ring, meet

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = [None] * ranks

    def be(rank):
        star, ring = meet(rank, ranks, port, timeout=30)
        found[rank] = around_ring(np.arange(size) * (rank + 1.0), rank, ranks, ring)
        for each in (*star.values(), *ring):
            each.connection.close()

    threads = [threading.Thread(target=be, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = np.arange(size) * sum(range(1, ranks + 1))
    assert all(np.array_equal(each, expected) for each in found)
