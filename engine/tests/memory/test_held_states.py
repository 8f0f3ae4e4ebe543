"""Which state the ranks continue from, by what each machine still holds."""

import pytest

from lockstep.memory.held_states import (
    HeldShards,
    Transfer,
    explain_loss,
    newest_complete,
    newest_joinable,
    parts_of,
    transfers_of,
)


def held(step, rank, era=1, world_size=4, copy=""):
    return HeldShards(era, step, world_size, 1, rank, f"{copy}{rank}@{step}")


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
    state = newest_complete(holdings, 1)
    assert state is not None
    assert state.step == step
    transfers = transfers_of(holdings, state)
    assert [(move.held.path, move.sender, move.receiver) for move in transfers] == moves
    assert all(isinstance(move, Transfer) for move in transfers)


ELSEWHERE = [[held(12, rank) for rank in range(4)]] * 2  # of four ranks, but now there are two
SPLIT = [[held(12, rank)._replace(tensor_parallel=2) for rank in range(4)]] * 2


@pytest.mark.parametrize(
    ("holdings", "reason"),
    [
        (machines([], []), ""),
        (LEFT_BEHIND, "of step 8, no machine has the shards of rank 0, 1, 3"),
        (
            machines([held(12, 0), held(12, 1)], [held(12, 2), held(10, 3)]),
            "of step 12, no machine has the shards of rank 3",
        ),
        (SPLIT, "the shards of step 12 are parts of split matrices"),
        (
            [COMPLETE[0], [held(12, 2), held(12, 3)]],
            "other ranks have saved step 12, and not each machine has all its shards",
        ),
    ],
    ids=["none", "left behind", "a rank lacks", "split", "not all on each machine"],
)
def test_without_all_shards_of_a_state_there_is_none(holdings, reason):
    assert newest_complete(holdings, 1) is None
    assert newest_joinable(holdings) is None
    assert explain_loss(holdings, 1) == reason


def test_other_ranks_join_the_shards_of_a_machine_that_has_them_all():
    assert newest_complete(ELSEWHERE, 1) is None
    state = newest_joinable(ELSEWHERE)
    assert state == held(12, 0)
    assert parts_of(ELSEWHERE[1], state) == [held(12, rank) for rank in range(4)]
