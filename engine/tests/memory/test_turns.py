"""How often states are kept in memory: as often as they take 1 % of the time."""

import pytest

from lockstep.memory.turns import KEEP, NOT_NOW, NOTHING, MemoryTurns


def turns(setting):
    made = MemoryTurns(setting, is_on=True)
    made.begin(100)
    return made


def with_first_state(setting):
    made = turns(setting)
    assert [made.ballot(step) for step in (101, 102)] == [NOTHING, KEEP]
    made.decide(102, is_kept=True)
    made.note_state(60.0)
    return made


def test_a_number_of_steps_counts_from_the_start_of_the_run():
    every_seven = turns(7)
    assert [step for step in range(101, 120) if every_seven.wish(step)] == [105, 112, 119]


def test_without_memory_nothing_is_kept():
    assert not any(MemoryTurns(setting).wish(10) for setting in ("auto", 1, False))


@pytest.mark.parametrize(
    ("waited", "background", "interval"), [(0.004, 0.006, 10), (0.3, 0.0, 300), (1e-6, 0.0, 1)]
)
def test_the_interval_is_the_smallest_that_costs_a_hundredth(waited, background, interval):
    auto = with_first_state("auto")
    for _ in range(20):
        auto.note_step(0.1)
    auto.note_step(60.0)  # a pause of the machine
    assert auto.interval is None  # the first state has no pages yet, so its cost is no rule
    assert [auto.wish(step) for step in (103, 104)] == [False, True]
    auto.decide(104, is_kept=True)
    auto.note_state(waited)
    auto.background = background
    assert auto.interval == interval
    assert next(step for step in range(105, 500) if auto.wish(step)) == 104 + interval


def test_a_step_that_becomes_slower_shortens_the_interval():
    auto = with_first_state("auto")
    auto.note_step(0.01)
    auto.note_state(0.01)
    assert auto.interval == 100
    for _ in range(64):
        auto.note_step(0.1)
    assert auto.interval == 10


def test_nothing_is_kept_while_the_last_state_is_incomplete():
    every = turns(1)
    every.is_blocked = lambda: True
    assert not every.wish(101)


def test_a_rank_that_cannot_keep_its_shards_refuses():
    assert turns(1).ballot(101) == KEEP
    assert MemoryTurns(1).ballot(101) == NOTHING  # not rank 0
    unable = turns(1)
    unable.is_unable = lambda: True
    assert unable.ballot(101) == NOT_NOW


def test_a_state_that_is_about_to_be_kept_counts_before_its_cost_is_known():
    auto = with_first_state("auto")
    auto.note_step(0.01)
    auto.note_state(0.01)
    assert auto.ballot(202) == KEEP
    auto.decide(202, is_kept=True)  # the vote on the next step comes before the state is taken
    assert auto.ballot(203) == NOTHING
    auto.decide(203, is_kept=False)
    assert next(step for step in range(203, 400) if auto.ballot(step) == KEEP) == 302
