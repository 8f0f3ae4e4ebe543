"""Where the ranks of one machine meet."""

import multiprocessing
import os
import socket
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.ranks import ranks
from lockstep.ranks.store import _name_of_start, _wait_for_address
from lockstep.ranks.waiting import MeetingError, Waiting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux lists open ports")
LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it
LISTENS = "0A"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listeners(port):
    """Return the addresses at which a process of this machine listens on `port`."""
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for path in files for line in path.read_text().splitlines()]
    return [row[1] for row in rows if row[3] == LISTENS and row[1].endswith(f":{port:04X}")]


@pytest.fixture
def joined(monkeypatch):
    """Connect two ranks, forks of this process; return who listens, and a sum over the ranks."""

    def connect(address, join):
        port, context = free_port(), multiprocessing.get_context("fork")
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        found = context.Queue()

        def run(rank):
            os.environ["RANK"] = str(rank)
            join(ranks.Ranks(rank, rank, 2, 2))
            total = torch.tensor(rank + 1)
            dist.all_reduce(total)
            found.put((listeners(port), int(total)))
            dist.barrier()  # the listener must not end before the other rank has looked
            found.close()
            found.join_thread()
            os._exit(0)  # the forked pytest must not continue

        started = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
            for each in started:
                each.start()
        results = [found.get(timeout=240) for _ in started]
        for each in started:
            each.join(60)
        return results

    return connect


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_no_other_machine_can_connect_to_the_ranks_of_one(joined, address):
    for where, total in joined(address, ranks.join):
        assert total == 3
        assert [place.partition(":")[0] for place in where] == [LOOPBACK]


def test_torch_alone_would_listen_on_all_addresses(joined):
    def join(_ranks):  # if this fails, torch no longer needs our address
        dist.init_process_group("gloo")

    for where, total in joined("127.0.0.1", join):
        assert total == 3
        assert [place for place in where if set(place.partition(":")[0]) == {"0"}]


def names_of_start(store, world_size):
    """Let all ranks of a new start agree on a name; return each rank's."""
    with ThreadPoolExecutor(world_size) as pool:
        agree = [
            pool.submit(_name_of_start, store(), rank, world_size, Waiting(60))
            for rank in reversed(range(world_size))
        ]
        return [each.result() for each in agree]


def test_each_start_at_one_store_has_a_name_of_its_own():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def store():
        return dist.TCPStore("127.0.0.1", server.port, is_master=False)

    starts = [names_of_start(store, world_size) for world_size in (3, 3, 2)]
    assert [len(set(names)) for names in starts] == [1, 1, 1]
    assert len({names[0] for names in starts}) == 3


def test_a_rank_that_asks_again_after_a_kill_is_answered_again():
    store = dist.HashStore()
    store.set("start/word of rank 1", "the word of a rank that was killed before it read")
    assert len(set(names_of_start(lambda: store, 2))) == 1


def test_a_name_may_get_its_address_late(monkeypatch):
    answers = [socket.gaierror(-2, "Name or service not known"), []]
    hosts = []

    def look_up(host, _port):
        hosts.append(host)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    _wait_for_address("pod-0", 29500, Waiting(60))
    assert hosts == ["pod-0", "pod-0"]
    answers.append(socket.gaierror(-2, "Name or service not known"))
    fault = "MASTER_ADDR=pod-0 did not come within -1 s: Name or service not known"
    with pytest.raises(MeetingError, match=fault):
        _wait_for_address("pod-0", 29500, Waiting(-1))


def test_waiting_ends_with_the_names_of_the_missing_ranks_and_hints_once(capsys, monkeypatch):
    monkeypatch.setattr("lockstep.ranks.waiting.HINT_SECONDS", 0.0)
    waiting = Waiting(0.05, "what to do")
    end = time.monotonic() + 0.04
    while time.monotonic() < end:
        waiting.go_on("rank 1, 3")
    time.sleep(0.02)
    with pytest.raises(MeetingError, match=r"^rank 1, 3 did not come within 0\.05 s$"):
        waiting.go_on("rank 1, 3")
    hint = "waiting for rank 1, 3, at most 0.05 s; what to do\n"
    assert capsys.readouterr() == ("", hint)
