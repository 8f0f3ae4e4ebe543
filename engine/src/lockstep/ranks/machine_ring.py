"""Bytes between machines: each rank has a copy of what the same rank of the machine before it has.

So whatever one machine loses, the next one has. The messages travel over gloo, in a group of their
own: a thread can send and receive them while training uses the other groups.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ranks.ranks import Ranks, gloo_group

PIECE = 1 << 26  # bytes of a message


class NoRoomError(Exception):
    """The next machine can't keep a copy."""


class MachineRing:
    """The ranks with one local number, in the order of their machines, the last before the first.

    Every rank must make it.

    Args:
        ranks: this process among all; each machine has equally many.
        seconds: the longest wait for another rank.
    """

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        self.next = (ranks.rank + ranks.local_world_size) % ranks.world_size
        self.previous = (ranks.rank - ranks.local_world_size) % ranks.world_size
        self._group: Any = gloo_group(seconds)

    def exchange(self, label: bytes, content: Tensor, make_room: Callable[[bytes], Tensor]) -> None:
        """Send bytes to the next machine, and receive the previous machine's at the same time.

        Args:
            label: says what the content is.
            content: bytes.
            make_room: is called with the previous machine's label; returns where as many bytes as
                its content has go, or raises an exception.

        Raises:
            NoRoomError: the next machine can't keep a copy; this one has received one.
            RuntimeError: a neighbor is gone, or silent for too long.
            Exception: what `make_room` has raised; the next machine has received its copy.
        """
        label_size = self._swap_number(len(label), self.next, self.previous)
        labels = torch.empty(label_size, dtype=torch.uint8)
        ours = torch.tensor([*label], dtype=torch.uint8)
        wait_for(self.send(ours, self.next) + self.receive(labels, self.previous))
        room: Tensor | None = None
        fault: Exception | None = None
        try:
            room = make_room(labels.numpy().tobytes())
        except Exception as error:  # raised once the next machine has its copy
            fault = error
        has_room = self._swap_number(int(room is not None), self.previous, self.next)
        works = []
        if has_room:
            works += self.send(content, self.next)
        if room is not None:
            works += self.receive(room, self.previous)
        wait_for(works)
        if fault is not None:
            raise fault
        if not has_room:
            raise NoRoomError(f"rank {self.next} has no room for a copy")

    def send(self, content: Tensor, receiver: int) -> list[dist.Work]:
        """Start to send bytes to any rank; return what to wait for."""
        works = [dist.isend(piece, receiver, self._group) for piece in pieces_of(content)]
        return [*filter(None, works)]

    def receive(self, room: Tensor, sender: int) -> list[dist.Work]:
        """Start to receive bytes from any rank; return what to wait for."""
        works = [dist.irecv(piece, sender, self._group) for piece in pieces_of(room)]
        return [*filter(None, works)]

    def _swap_number(self, number: int, receiver: int, sender: int) -> int:
        """Send a number to one neighbor, and return the other one's."""
        theirs = torch.empty(1, dtype=torch.int64)
        ours = torch.tensor([number])
        wait_for(self.send(ours, receiver) + self.receive(theirs, sender))
        return int(theirs.item())


def pieces_of(content: Tensor) -> Iterator[Tensor]:
    """Yield bytes in pieces of one message each; nothing of no bytes."""
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until all messages have arrived."""
    for work in works:
        work.wait()
