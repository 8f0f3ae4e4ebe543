"""Which shards of states the machines hold in memory, and from which of them a run can continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.memory.files import KeptState


class HeldShards(NamedTuple):
    """One rank's shards of the state after a step, in the memory of some machine."""

    era: int  # begins with each start that doesn't continue from memory; later ones are greater
    step: int
    world_size: int  # of the ranks whose shards make up the state
    tensor_parallel: int  # how many of them split layers
    rank: int  # whose shards these are
    path: str

    @property
    def state(self) -> tuple[int, int, int, int]:
        """What all shards of one state have in common."""
        return self.era, self.step, self.world_size, self.tensor_parallel


class Transfer(NamedTuple):
    """Shards that one rank sends to another."""

    held: HeldShards
    sender: int
    receiver: int


def held_by(kept: KeptState) -> HeldShards:
    """Return what other ranks must know of shards in this machine's memory."""
    return HeldShards(step=kept.step, path=str(kept.path), **kept.header.part)


# For each rank, the shards in the memory of its machine.
Holdings = Sequence[Sequence[HeldShards]]


def newest_complete(holdings: Holdings, tensor_parallel: int) -> HeldShards | None:
    """Return rank 0's shards of the newest state of which all ranks' are somewhere; None: none is.

    The state must be of as many ranks as there are now, and of the last era: what came before, the
    run has left behind.
    """
    for held in _of_last_era(holdings):
        now = (len(holdings), tensor_parallel)
        if held.rank != 0 or (held.world_size, held.tensor_parallel) != now:
            continue
        others = [_holder_of(holdings, held, rank) for rank in range(len(holdings))]
        if None not in others:
            return held
    return None


def newest_joinable(holdings: Holdings) -> HeldShards | None:
    """Return rank 0's shards of the newest state that each machine has all of; None: none is.

    It may be of any number of ranks, if none of them split matrices.
    """
    for held in _of_last_era(holdings):
        if held.rank != 0 or held.tensor_parallel != 1:
            continue
        if all(parts_of(of_machine, held) is not None for of_machine in holdings):
            return held
    return None


def parts_of(of_machine: Sequence[HeldShards], state: HeldShards) -> list[HeldShards] | None:
    """Return the shards of each rank of a state, by rank, if a machine has them all."""
    by_rank = {held.rank: held for held in of_machine if held.state == state.state}
    if len(by_rank) < state.world_size:
        return None
    return [by_rank[rank] for rank in range(state.world_size)]


def _of_last_era(holdings: Holdings) -> list[HeldShards]:
    """Return all shards of the last era, the newest first."""
    all_held = {held for of_machine in holdings for held in of_machine}
    last_era = max((held.era for held in all_held), default=0)
    return sorted((held for held in all_held if held.era == last_era), reverse=True)


def explain_loss(holdings: Holdings, tensor_parallel: int) -> str:
    """Return why the newest state can't be used, as the end of a sentence.

    It is empty if there is no state, or if the ranks are those that have saved it.
    """
    newest = next(iter(_of_last_era(holdings)), None)
    if newest is None:
        return ""
    ranks = range(newest.world_size)
    missing = [str(rank) for rank in ranks if _holder_of(holdings, newest, rank) is None]
    if missing:
        return f"of step {newest.step}, no machine has the shards of rank {', '.join(missing)}"
    then = (newest.world_size, newest.tensor_parallel)
    if then == (len(holdings), tensor_parallel):
        return ""
    if newest.tensor_parallel != 1:
        return f"the shards of step {newest.step} are parts of split matrices"
    return f"other ranks have saved step {newest.step}, and not each machine has all its shards"


def on_machine_of(holdings: Holdings, state: HeldShards, rank: int) -> HeldShards | None:
    """Return the shards of `rank` of the same state as `state`, if its own machine has them."""
    wanted = (state.state, rank)
    return next((held for held in holdings[rank] if (held.state, held.rank) == wanted), None)


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
    wanted = (state.state, rank)
    for holder, of_machine in enumerate(holdings):
        for held in of_machine:
            if (held.state, held.rank) == wanted:
                return holder, held
    return None
