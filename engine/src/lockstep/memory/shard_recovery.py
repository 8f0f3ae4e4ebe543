"""How restarted ranks find their shards in memory, also in that of other machines."""

from __future__ import annotations

import logging
from dataclasses import replace

from lockstep.memory.files import (
    Header,
    Identity,
    KeptState,
    SharedMemoryError,
    make_folder,
)
from lockstep.memory.held_states import (
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
from lockstep.memory.shards import RankShards, name_of, shards_in
from lockstep.memory.slots import Slot, SlotPair
from lockstep.memory.states import is_intact, mapped
from lockstep.ranks.machine_ring import MachineRing, wait_for
from lockstep.ranks.ranks import Ranks, from_each_rank, is_rank_zero

logger = logging.getLogger(__name__)


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
        tensor_parallel: how many ranks split layers.
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


def _any_damaged(states: list[KeptState]) -> bool:
    """Remove damaged ones; return whether any rank had one. Rank 0 logs them."""
    damaged = [state.path for state in states if not is_intact(state)]
    for path in damaged:
        path.unlink(missing_ok=True)
    all_damaged = [path for paths in from_each_rank(damaged) for path in paths]
    if is_rank_zero():
        for path in all_damaged:
            logger.warning("removed %s from memory: it was damaged", path)
    return bool(all_damaged)


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


def remove_other_shards(identity: Identity, chosen: KeptState | None) -> None:
    """Remove what the run leaves behind, once every rank has `chosen`; None: all shards."""
    for state in shards_in(identity):
        is_same = chosen is not None and held_by(state).state == held_by(chosen).state
        if not is_same:
            state.path.unlink(missing_ok=True)
