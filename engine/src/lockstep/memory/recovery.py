"""Finds the newest state in any machine's memory, and gives it to the machines that lack it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.memory.files import (
    Header,
    Identity,
    KeptState,
    SharedMemoryError,
    states_in,
)
from lockstep.memory.states import is_intact, mapped
from lockstep.memory.writer import MemoryWriter
from lockstep.ranks.machine_ring import pieces_of
from lockstep.ranks.ranks import Ranks, from_each_rank, gloo_group

logger = logging.getLogger(__name__)


def newest_in_memory(
    identity: Identity, writer: MemoryWriter | None, at_least: int, seconds: float
) -> KeptState | None:
    """Return this machine's file of the newest intact state, which may come from another one.

    Every rank must call this.

    Args:
        identity: of the run, on this machine.
        writer: of this machine, on the rank that has it.
        at_least: rank 0's newest checkpoint; an older state than that is none.
        seconds: the longest wait for another rank.
    """
    ranks = Ranks.from_environment()
    is_first = ranks.local_rank == 0
    own = newest_here(identity) if is_first else None
    offers: list[tuple[int, KeptState | None, bool]] = from_each_rank((at_least, own, is_first))
    at_least = offers[0][0]
    found = {rank: state for rank, (_, state, _) in enumerate(offers) if state is not None}
    if not found:
        return None
    source = max(found, key=lambda rank: found[rank].step)
    newest = found[source]
    if newest.step < at_least:
        return None
    readers = [rank for rank, (_, _, is_reader) in enumerate(offers) if is_reader]
    lacking = [rank for rank in readers if rank not in found or not _is_same(found[rank], newest)]
    if lacking:
        group = gloo_group(seconds, [source, *lacking])
        if ranks.rank == source:
            _send(newest, group)
        if ranks.rank in lacking:
            assert writer is not None, "the first rank of a machine writes"
            own = _receive(newest.header, source, group, identity, writer)
    files: list[KeptState | None] = from_each_rank(own)
    if any(files[rank] is None for rank in readers):
        return None
    here = [state for state in files if state is not None and state.is_here()]
    return next(state for state in here if _is_same(state, newest))


def newest_here(identity: Identity) -> KeptState | None:
    """Return the newest state in this machine's memory that matches its digest."""
    try:
        for state in states_in(identity):
            if state.header.part:
                continue  # one rank's shards
            if is_intact(state):
                return state
            logger.warning("skipped the state of step %d in memory: it is damaged", state.step)
    except SharedMemoryError as fault:
        logger.warning("no state in memory is used: %s", fault)
    return None


def newest_whole_step(identity: Identity) -> int:
    """Return the step of the newest whole state in this machine's memory, not verified; 0: none."""
    try:
        wholes = [state.step for state in states_in(identity) if not state.header.part]
    except SharedMemoryError:  # which is told when the state is looked for
        return 0
    return max(wholes, default=0)


def _is_same(state: KeptState, other: KeptState) -> bool:
    """Return whether two machines' states have the same bytes; only those of one writer do."""
    return replace(state.header, identity=other.header.identity) == other.header


def _send(state: KeptState, group: dist.ProcessGroup) -> None:
    content = mapped(state)
    for piece in pieces_of(content):
        dist.broadcast(piece, src=dist.get_rank(), group=group)


def _receive(
    header: Header,
    source: int,
    group: dist.ProcessGroup,
    identity: Identity,
    writer: MemoryWriter,
) -> KeptState | None:
    """Put the state of the rank `source` into this machine's memory; None if it has no room."""
    header = replace(header, identity=identity)
    slot = None
    try:
        slot = writer.slot_for_copy()
        slot.reserve(header.size)
        content: Tensor = slot.content[: header.size]
    except SharedMemoryError as fault:
        logger.warning("the newest state in memory doesn't fit on this machine: %s", fault)
        slot = None
        content = torch.empty(header.size, dtype=torch.uint8)
    for piece in pieces_of(content):
        dist.broadcast(piece, src=source, group=group)
    if slot is None:
        return None
    slot.write_header(header)
    slot.close()
    state = KeptState(slot.path, header)
    return state if is_intact(state) else None
