"""What a rank keeps in memory of a state that is spread over all ranks, and copies of it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from lockstep.memory.files import (
    Header,
    Identity,
    KeptState,
    SharedMemoryError,
    make_folder,
    states_in,
)
from lockstep.memory.held_states import held_by
from lockstep.memory.slots import Slot, SlotPair
from lockstep.ranks.machine_ring import MachineRing, NoRoomError
from lockstep.ranks.ranks import Ranks, from_rank_zero

logger = logging.getLogger(__name__)


NO_LABEL = b""  # of no shards
COPY_RATE = 1e9  # bytes per second that a core sends or receives through a socket


class RankShards:
    """What a rank keeps in memory if a state is spread over all ranks.

    Args:
        ranks: this process among all.
        ring: connects the machines; None: there is one.
        tensor_parallel: how many ranks split layers.
    """

    def __init__(self, ranks: Ranks, ring: MachineRing | None, tensor_parallel: int = 1) -> None:
        self.ranks = ranks
        self.tensor_parallel = tensor_parallel
        self.ring = ring
        self.name = name_of(ranks.rank)
        self.part: dict[str, int] = {}  # which part of a state this rank's shards are
        self.has_copy = ring is None  # of what the run continues from, here or nowhere needed
        self._copies: ShardCopies | None = None

    @classmethod
    def connected(cls, ranks: Ranks, seconds: float, tensor_parallel: int) -> Self:
        """Connect the machines; every rank must call this.

        Args:
            ranks: this process among all.
            seconds: the longest wait for another rank.
            tensor_parallel: how many ranks split layers.
        """
        ring = None
        if ranks.num_nodes > 1:
            ring = MachineRing(ranks, seconds)
        return cls(ranks, ring, tensor_parallel)

    def begin_era(self, kept: KeptState | None) -> None:
        """Continue the era of what the run continues from, or begin one; all ranks must call it."""
        era = from_rank_zero(time.time_ns())
        if kept is not None:
            era = kept.header.part["era"]
        self.part = part_of_rank(self.ranks, era, self.tensor_parallel)

    def start(self, identity: Identity, size: int, kept: KeptState | None) -> None:
        """Take memory for copies of `size` bytes, or raise a `SharedMemoryError`."""
        if self.ring is not None:
            copy = copy_of(self.ring.previous, identity, kept)
            self.has_copy = copy is not None
            self._copies = ShardCopies(self.ring, identity, copy)
            self._copies.reserve(size)

    def copy(self, header: Header, content: Tensor) -> float:
        """Copy this rank's shards to the next machine, if there is one; return the CPU seconds.

        Raises:
            SharedMemoryError: a machine can't keep the copy, or is gone.
        """
        if self._copies is None:
            return 0.0
        self._copies.update(header.pack(), content)
        return 2 * header.size / COPY_RATE  # gloo's threads send and receive

    def skip(self) -> None:
        """Tell the next machine that there are no shards to copy; it waits for the word."""
        if self._copies is not None:
            self._copies.update(NO_LABEL, torch.empty(0, dtype=torch.uint8))

    def close(self) -> None:
        """Close the files; the copies stay."""
        if self._copies is not None:
            self._copies.close()


class ShardCopies:
    """A copy of what a rank of the machine before this one keeps, updated by a thread.

    Args:
        ring: connects the machines.
        identity: of the run, on this machine.
        kept: a copy that stays until the first new one.
    """

    def __init__(self, ring: MachineRing, identity: Identity, kept: KeptState | None) -> None:
        self._ring = ring
        self._identity = identity
        path = kept.path if kept else None
        self._slots = SlotPair(make_folder(identity), f"copy of {ring.previous}", path)

    def reserve(self, size: int) -> None:
        """Take memory for copies of `size` bytes, or raise a `SharedMemoryError`."""
        self._slots.reserve(size)

    def close(self) -> None:
        """Close the files."""
        self._slots.close()

    def update(self, label: bytes, content: Tensor) -> None:
        """Send this rank's shards to the next machine, and keep those of the machine before.

        Args:
            label: their header, or `NO_LABEL`.
            content: their bytes.

        Raises:
            SharedMemoryError: this machine or the next can't keep a copy, or a neighbor is gone.
        """
        received: list[tuple[Slot, Header]] = []

        def make_room(label: bytes) -> Tensor:
            if label == NO_LABEL:
                return torch.empty(0, dtype=torch.uint8)
            theirs = header_of(label)
            slot = self._slots.next_slot()
            received.append((slot, theirs))
            return slot.empty(theirs.size)

        try:
            self._ring.exchange(label, content, make_room)
        except NoRoomError as error:
            raise SharedMemoryError(str(error)) from None
        except RuntimeError as error:
            raise SharedMemoryError(f"another machine is lost ({first_line(error)})") from None
        for slot, theirs in received:
            slot.write_header(replace(theirs, identity=self._identity))


def header_of(label: bytes) -> Header:
    """Return the header that another rank has packed."""
    header = Header.unpack(label)
    if header is None:
        raise SharedMemoryError("the header of another machine's state was damaged on its way")
    return header


def first_line(error: Exception) -> str:
    """Return the first line of an error of torch, which has a stack in the others."""
    return str(error).partition("\n")[0]


def copy_of(rank: int, identity: Identity, kept: KeptState | None) -> KeptState | None:
    """Return this machine's copy of the shards of `rank`, of the same state as `kept`."""
    if kept is None:
        return None
    for state in shards_in(identity):
        held = held_by(state)
        if held.rank == rank and held.state == held_by(kept).state:
            return state
    return None


def part_of_rank(ranks: Ranks, era: int, tensor_parallel: int = 1) -> dict[str, int]:
    """Return which part of a state this rank's shards are, as a header has it."""
    return {
        "era": era,
        "world_size": ranks.world_size,
        "tensor_parallel": tensor_parallel,
        "rank": ranks.rank,
    }


def shards_in(identity: Identity) -> list[KeptState]:
    """Return the shards of any rank in this machine's memory, not verified yet."""
    try:
        return [state for state in states_in(identity) if "era" in state.header.part]
    except SharedMemoryError as fault:
        logger.warning("%s: no state is read from memory", fault)
        return []


def name_of(rank: int) -> str:
    """Return the name of the slots of `rank`."""
    return f"rank {rank}"
