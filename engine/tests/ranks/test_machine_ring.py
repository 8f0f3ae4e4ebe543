"""Machines that keep copies for each other: four ranks as two machines, or as four."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.ranks import machine_ring
from lockstep.ranks.machine_ring import MachineRing, NoRoomError
from lockstep.ranks.ranks import Ranks


def ring_of(rank, machines, seconds=60):
    local = 4 // machines
    return MachineRing(Ranks(rank, rank % local, 4, local), seconds)


def content_of(rank):
    return torch.arange(10 + rank * 7, dtype=torch.uint8) + rank  # of different sizes


def kept_after(ring, rank):
    rooms = []

    def make_room(label):
        rooms.append(torch.zeros(int(label), dtype=torch.uint8))
        return rooms[-1]

    content = content_of(rank)
    ring.exchange(str(len(content)).encode(), content, make_room)
    (room,) = rooms
    return room


@pytest.mark.parametrize(("machines", "owners"), [(2, [2, 3, 0, 1]), (4, [3, 0, 1, 2])])
def test_each_rank_keeps_what_the_machine_before_it_has(on_ranks, monkeypatch, machines, owners):
    monkeypatch.setattr(machine_ring, "PIECE", 4)  # several messages

    def exchange(rank):
        return kept_after(ring_of(rank, machines), rank).tolist()

    assert on_ranks(4, exchange) == [content_of(owner).tolist() for owner in owners]


def test_a_thread_exchanges_while_training_uses_other_groups(on_ranks):
    def exchange(rank):
        ring = ring_of(rank, machines=2)
        kept = []
        thread = threading.Thread(
            target=lambda: kept.extend(kept_after(ring, rank) for _ in range(20))
        )
        thread.start()
        total = torch.ones(1)
        for _ in range(50):
            dist.all_reduce(total)
            total /= 4
        thread.join()
        other = content_of((rank + 2) % 4)
        return total.item(), len(kept), all(torch.equal(copy, other) for copy in kept)

    assert on_ranks(4, exchange) == [(1.0, 20, True)] * 4


def test_a_machine_without_room_still_gives_its_own_bytes(on_ranks):
    def exchange(rank):
        ring = ring_of(rank, machines=4)
        if rank != 2:
            try:
                return kept_after(ring, rank).tolist()
            except NoRoomError as error:
                return str(error)
        with pytest.raises(OSError, match="full"):
            ring.exchange(str(len(content_of(rank))).encode(), content_of(rank), fail)
        return "failed"

    def fail(_label):
        raise OSError("full")

    results = on_ranks(4, exchange)
    assert results[1] == "rank 2 has no room for a copy"
    assert results[2] == "failed"
    assert results[3] == content_of(2).tolist()
    assert results[0] == content_of(3).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("silence", [0, 10], ids=["killed", "silent"])
def test_nobody_waits_forever_for_a_lost_neighbor(on_ranks, silence):
    def exchange(rank):
        ring = ring_of(rank, machines=2, seconds=3)
        if rank == 3:
            time.sleep(silence)  # longer than the others wait; then its process ends
            return "lost"
        try:
            return kept_after(ring, rank).tolist()
        except RuntimeError:
            return "gave up"

    expected = [content_of(2).tolist(), "gave up", content_of(0).tolist(), "lost"]
    assert on_ranks(4, exchange) == expected
