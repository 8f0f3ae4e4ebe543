"""Which shards of states the machines hold in memory, and from which of them a run can continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HeldShards(NamedTuple):
    """One rank's shards of the state after a step, in the memory of some machine."""

    era: int  # begins with each start that doesn't continue from memory; later ones are greater
    step: int
    world_size: int  # of the ranks whose shards make up the state
    rank: int  # whose shards these are
    path: str


class Transfer(NamedTuple):
    """Shards that one rank sends to another."""

    held: HeldShards
    sender: int
    receiver: int


# For each rank, the shards in the memory of its machine.
Holdings = Sequence[Sequence[HeldShards]]


def newest_complete(holdings: Holdings) -> HeldShards | None:
    """Return rank 0's shards of the newest state of which all ranks' are somewhere; None: none is.

    The state must be of as many ranks as there are now, and of the last era: what came before, the
    run has left behind.
    """
    all_held = {held for of_machine in holdings for held in of_machine}
    last_era = max((held.era for held in all_held), default=0)
    for held in sorted(all_held, reverse=True):
        if held.rank != 0 or held.era != last_era or held.world_size != len(holdings):
            continue
        others = [_holder_of(holdings, held, rank) for rank in range(len(holdings))]
        if None not in others:
            return held
    return None


def explain_loss(holdings: Holdings) -> str:
    """Return why no state is complete, as a sentence without an end; empty if there are no shards.

    Of the newest state.
    """
    all_held = {held for of_machine in holdings for held in of_machine}
    if not all_held:
        return ""
    newest = max(all_held)
    if newest.world_size != len(holdings):
        return (
            f"the shards of step {newest.step} are those of {newest.world_size} ranks, "
            f"not of {len(holdings)}"
        )
    missing = [
        str(rank) for rank in range(newest.world_size) if _holder_of(holdings, newest, rank) is None
    ]
    return f"of step {newest.step}, no machine has the shards of rank {', '.join(missing)}"


def on_machine_of(holdings: Holdings, state: HeldShards, rank: int) -> HeldShards | None:
    """Return the shards of `rank` of the same state as `state`, if its own machine has them."""
    wanted = (*state[:3], rank)
    return next((held for held in holdings[rank] if held[:4] == wanted), None)


def transfers_of(holdings: Holdings, state: HeldShards) -> list[Transfer]:
    """Return what must travel until each rank's shards of a complete state are on its machine."""
    transfers = []
    for rank in range(len(holdings)):
        if on_machine_of(holdings, state, rank) is not None:
            continue
        holder = _holder_of(holdings, state, rank)
        assert holder is not None, "the state is complete"
        transfers.append(Transfer(holder[1], holder[0], rank))
    return transfers


def _holder_of(holdings: Holdings, state: HeldShards, rank: int) -> tuple[int, HeldShards] | None:
    """Return the first rank whose machine has the shards of `rank`, and these."""
    wanted = (*state[:3], rank)
    for holder, of_machine in enumerate(holdings):
        for held in of_machine:
            if held[:4] == wanted:
                return holder, held
    return None
