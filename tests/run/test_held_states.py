"""Which state the ranks continue from, by what each machine still holds."""

import pytest

from lockstep_gpt.run.held_states import (
    HeldShards,
    Transfer,
    newest_complete,
    transfers_of,
)


def held(step, rank, era=1, world_size=4, copy=""):
    return HeldShards(era, step, world_size, rank, f"{copy}{rank}@{step}")


def machines(first, second):
    """Return what each of four ranks sees: its machine has two of them."""
    return [first, first, second, second]


def both(first_step, second_step, rank):
    return [held(first_step, rank), held(second_step, rank)]


def copies(step, *ranks):
    return [held(step, rank, copy="copy of ") for rank in ranks]


COMPLETE = machines(
    [*both(10, 12, 0), *both(10, 12, 1), *copies(12, 2, 3)],
    [*both(10, 12, 2), *both(10, 12, 3), *copies(12, 0, 1)],
)
LOST = machines([], COMPLETE[2])
SWAPPED = machines(COMPLETE[2], COMPLETE[0])
# Killed while rank 3 wrote its shards of step 14 over those of 10.
WRITING = machines(
    [held(14, 0), held(12, 0), *both(14, 12, 1)],
    [*both(14, 12, 2), held(12, 3)],
)
# From then on, all but rank 3 had a state of the era before in their second slot.
NEW_ERA = machines(
    [held(14, 0), held(8, 0, era=2), held(14, 1), held(8, 1, era=2)],
    [held(14, 2), held(8, 2, era=2), held(6, 3, era=2), held(8, 3, era=2)],
)
LEFT_BEHIND = machines(COMPLETE[0], [*COMPLETE[2], held(8, 2, era=2)])


@pytest.mark.parametrize(
    ("holdings", "step", "moves"),
    [
        (COMPLETE, 12, []),
        (LOST, 12, [("copy of 0@12", 2, 0), ("copy of 1@12", 2, 1)]),
        (SWAPPED, 12, []),
        (WRITING, 12, []),
        (NEW_ERA, 8, []),
        (machines(COMPLETE[0], []), 12, [("copy of 2@12", 0, 2), ("copy of 3@12", 0, 3)]),
    ],
    ids=["complete", "lost", "swapped", "writing", "new era", "the other lost"],
)
def test_the_newest_state_that_all_ranks_can_get_is_chosen(holdings, step, moves):
    state = newest_complete(holdings)
    assert state is not None
    assert state.step == step
    transfers = transfers_of(holdings, state)
    assert [(move.held.path, move.sender, move.receiver) for move in transfers] == moves
    assert all(isinstance(move, Transfer) for move in transfers)


@pytest.mark.parametrize(
    "holdings",
    [
        machines([], []),
        LEFT_BEHIND,
        machines([held(12, 0), held(12, 1)], [held(12, 2), held(10, 3)]),
        [[held(12, rank) for rank in range(4)]] * 2,  # of four ranks, but now there are two
    ],
    ids=["none", "left behind", "a rank lacks", "fewer ranks"],
)
def test_without_all_shards_of_a_state_there_is_none(holdings):
    assert newest_complete(holdings) is None
