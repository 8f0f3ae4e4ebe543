"""Shards of a run's states in memory: where they are, and how restarted ranks get their own."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from lockstep_gpt.distributed.machine_ring import MachineRing, NoRoomError, wait_for
from lockstep_gpt.distributed.ranks import Ranks, from_each_rank, from_rank_zero
from lockstep_gpt.run.held_states import (
    HeldShards,
    Transfer,
    explain_loss,
    held_by,
    newest_complete,
    newest_joinable,
    on_machine_of,
    parts_of,
    transfers_of,
)
from lockstep_gpt.run.memory_files import (
    Header,
    Identity,
    KeptState,
    SharedMemoryError,
    make_folder,
    states_in,
)
from lockstep_gpt.run.memory_slots import Slot, SlotPair
from lockstep_gpt.run.memory_states import is_intact, mapped

logger = logging.getLogger(__name__)


NO_LABEL = b""  # of no shards
COPY_RATE = 1e9  # bytes per second that a core sends or receives through a socket


class RankShards:
    """What a rank keeps in memory if a state is spread over all ranks.

    Args:
        ranks: this process among all.
        ring: connects the machines; None: there is one.
        tensor_parallel: how many ranks split each matrix.
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
            tensor_parallel: how many ranks split each matrix.
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


def find_shards(
    identity: Identity, ranks: Ranks, ring: MachineRing | None, tensor_parallel: int = 1
) -> KeptState | None:
    """Return this rank's shards of the newest state that all ranks can get; None: there is none.

    What only another machine has travels to this one. Damaged shards are removed. Every rank must
    call this.

    Args:
        identity: of the run, on this machine.
        ranks: this process among all.
        ring: connects the machines; None: there is one.
        tensor_parallel: how many ranks split each matrix.
    """
    while True:
        kept, holdings = _holdings(identity)
        chosen = newest_complete(holdings, tensor_parallel)
        if chosen is None:
            return None
        transfers = transfers_of(holdings, chosen)
        needed = [move.held for move in transfers if move.sender == ranks.rank]
        own = on_machine_of(holdings, chosen, ranks.rank)
        if own is not None:
            needed.append(own)
        if _any_damaged([kept[held] for held in needed]):
            continue
        if not transfers:
            assert own is not None, "nothing has to travel"
            return kept[own]
        assert ring is not None, "all ranks of one machine see the same memory"
        if not _transfer(transfers, kept, identity, ranks, ring):
            return None


def find_joinable(identity: Identity, ranks: Ranks, tensor_parallel: int = 1) -> KeptState | None:
    """Return the newest state of any number of ranks of which each machine has all shards.

    Every rank must call this; the arguments are those of `find_shards`.
    """
    while True:
        kept, holdings = _holdings(identity)
        chosen = newest_joinable(holdings)
        if chosen is None:
            reason = explain_loss(holdings, tensor_parallel)
            if reason and ranks.rank == 0:
                logger.warning("no state is read from memory: %s", reason)
            return None
        held_parts = parts_of(holdings[ranks.rank], chosen)
        assert held_parts is not None, "each machine has all shards"
        parts = [kept[held] for held in held_parts]
        if not _any_damaged(parts if ranks.local_rank == 0 else []):
            return replace(parts[0], parts=tuple(parts))


def _holdings(identity: Identity) -> tuple[dict[HeldShards, KeptState], list[list[HeldShards]]]:
    """Return the shards in this machine's memory, and those in that of each rank."""
    kept = {held_by(state): state for state in shards_in(identity)}
    return kept, from_each_rank([*kept])


def shards_in(identity: Identity) -> list[KeptState]:
    """Return the shards of any rank in this machine's memory, not verified yet."""
    try:
        return [state for state in states_in(identity) if "era" in state.header.part]
    except SharedMemoryError as fault:
        logger.warning("%s: no state is read from memory", fault)
        return []


def newest_shards(
    identity: Identity, ranks: Ranks, shards: RankShards | None, at_least: int
) -> KeptState | None:
    """Return this rank's shards of the newest state in memory, or all of them to join.

    All others are removed. Every rank must call this.

    Args:
        identity: of the run, on this machine.
        ranks: this process among all.
        shards: what this rank keeps; None: whole states.
        at_least: step of the newest checkpoint or whole state that this rank knows of; an older one
            than the newest of all ranks' is none.
    """
    kept = None
    tensor_parallel = 1
    if shards is not None:
        tensor_parallel = shards.tensor_parallel
        kept = find_shards(identity, ranks, shards.ring, tensor_parallel)
    if kept is None:
        kept = find_joinable(identity, ranks, tensor_parallel)
    at_least = max(from_each_rank(at_least))
    if kept is not None and kept.step < at_least:
        kept = None
    remove_other_shards(identity, kept)
    from_each_rank(None)  # before one of them writes
    return kept


def remove_other_shards(identity: Identity, chosen: KeptState | None) -> None:
    """Remove what the run leaves behind, once every rank has `chosen`; None: all shards."""
    for state in shards_in(identity):
        is_same = chosen is not None and held_by(state).state == held_by(chosen).state
        if not is_same:
            state.path.unlink(missing_ok=True)


def _any_damaged(states: list[KeptState]) -> bool:
    """Remove damaged ones; return whether any rank had one."""
    damaged = [state for state in states if not is_intact(state)]
    for state in damaged:
        logger.warning("removed %s, which was damaged", state.path)
        state.path.unlink(missing_ok=True)
    return any(from_each_rank(len(damaged)))


def _transfer(
    transfers: list[Transfer],
    kept: dict[HeldShards, KeptState],
    identity: Identity,
    ranks: Ranks,
    ring: MachineRing,
) -> bool:
    """Move shards to the machines of their ranks; return whether there is room for all."""
    outgoing = [move for move in transfers if move.sender == ranks.rank]
    incoming = [move for move in transfers if move.receiver == ranks.rank]
    headers: dict[HeldShards, Header] = {}
    for sent in from_each_rank({move.held: kept[move.held].header for move in outgoing}):
        headers |= sent
    slots = []
    fault = None
    try:
        slots = [_empty_slot(identity, ranks, headers[move.held].size) for move in incoming]
    except SharedMemoryError as error:
        fault = str(error)
    faults = [*filter(None, from_each_rank(fault))]
    if faults:
        if ranks.rank == 0:
            logger.warning("no state is read from memory: %s", faults[0])
        return False
    contents = [mapped(kept[move.held]) for move in outgoing]
    works = []
    for move, content in zip(outgoing, contents, strict=True):
        works += ring.send(content, move.receiver)
    for move, slot in zip(incoming, slots, strict=True):
        works += ring.receive(slot.content[: headers[move.held].size], move.sender)
    wait_for(works)
    for move, slot in zip(incoming, slots, strict=True):
        slot.write_header(replace(headers[move.held], identity=identity))
        slot.close()
    return True


def _empty_slot(identity: Identity, ranks: Ranks, size: int) -> Slot:
    slot = SlotPair(make_folder(identity), name_of(ranks.rank)).next_slot()
    slot.empty(size)
    return slot


def name_of(rank: int) -> str:
    """Return the name of the slots of `rank`."""
    return f"rank {rank}"
