"""Shares are exact, at any position and across changes."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.extras.datasets import turns as module
from lockstep_gpt.extras.datasets.turns import PERIOD, Phase, Turns, rounded

PREFIX = 10_000


def phases_of(tables, starts=(0,)):
    result = []
    for start, weights in zip(starts, tables, strict=True):
        total = sum(Fraction(str(weight)) for weight in weights)
        shares = tuple(Fraction(str(weight)) / total for weight in weights)
        result.append(Phase(start, shares))
    return result


def counted(turns, sources, count):
    """Return how many windows each source has after each position, (sources, count + 1)."""
    taken = np.zeros((sources, count + 1), np.int64)
    taken[turns.at(np.arange(count))[0], np.arange(1, count + 1)] = 1
    return taken.cumsum(axis=1)


def due(phases, count):
    steps = np.zeros((len(phases[0].shares), count + 1))
    for phase in phases:
        steps[:, phase.start + 1 :] = np.array([*map(float, phase.shares)])[:, None]
    return steps.cumsum(axis=1)


weight = st.floats(1e-6, 1, allow_subnormal=False) | st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 7])


@given(st.data())
def test_a_prefix_of_10_000_windows_has_each_share_to_one_window(data):
    sources = data.draw(st.integers(2, 12))
    changes = data.draw(st.lists(st.integers(1, PREFIX), max_size=3, unique=True))
    starts = [0, *sorted(changes)]
    table = st.lists(weight, min_size=sources, max_size=sources)
    phases = phases_of([data.draw(table) for _ in starts], starts)
    counts = counted(Turns(phases), sources, PREFIX)
    bound = 1 - 1 / (2 * sources - 2)  # Tijdeman's, the best possible
    assert np.abs(counts - due(phases, PREFIX)).max() <= bound + 1e-6


def test_a_source_may_be_absent_for_a_while():
    phases = phases_of([(1, 1, 0), (0, 1, 3), (1, 0, 0)], (0, 500, 900))
    counts = counted(Turns(phases), 3, 2000)
    assert counts[2, 500] == 0
    assert counts[0, 900] - counts[0, 500] <= 1
    assert counts[0, 2000] - counts[0, 910] == 1090


def test_shares_of_few_digits_never_drift():
    turns = Turns(phases_of([(0.7, 0.2, 0.1)]))
    assert turns.counts(10**15).tolist() == [7 * 10**14, 2 * 10**14, 10**14]


def test_other_shares_drift_by_less_than_one_window_in_a_period():
    phases = phases_of([(np.pi, np.e, 1 / 3)])
    counts = Turns(phases).counts(10**9)
    assert counts.sum() == 10**9
    wanted = np.array([*map(float, phases[0].shares)]) * 10**9
    assert np.abs(counts - wanted).max() < 10**9 / PERIOD


@given(st.lists(weight, min_size=1, max_size=12), st.integers(0, 10**12))
def test_counts_and_turns_agree_at_any_position(weights, start):
    turns = Turns(phases_of([weights]))
    sources, numbers = turns.at(np.arange(start, start + 200))
    before = turns.counts(start)
    for source, number in zip(sources, numbers, strict=True):
        assert number == before[source]
        before[source] += 1
    assert before.tolist() == turns.counts(start + 200).tolist()


def test_counts_continue_across_phases_and_stretches():
    starts = (0, 100, PERIOD - 1, PERIOD + 5, 3 * PERIOD)
    turns = Turns(phases_of([(1, 2), (3, 1), (1, 1), (5, 1), (1, 7)], starts))
    for start in (0, *starts, PERIOD, 4 * PERIOD):
        first = max(0, start - 50)
        sources, numbers = turns.at(np.arange(first, start + 50))
        before = turns.counts(first)
        for source, number in zip(sources, numbers, strict=True):
            assert number == before[source]
            before[source] += 1


def test_several_phases_may_start_at_one_position():
    turns = Turns(phases_of([(1, 0), (1, 1), (0, 1)], (0, 0, 0)))
    assert turns.at(np.arange(10))[0].tolist() == [1] * 10


def test_memory_does_not_depend_on_the_length_of_a_run():
    changes = [k * 10**9 for k in range(4)]
    turns = Turns(phases_of([(1.1, 2.3, 5.77)] * 4, changes))
    held = sum(stretch.turns.nbytes + stretch.numbers.nbytes for stretch in turns.stretches)
    assert held <= 4 * 5 * PERIOD


def test_parts_sum_to_the_unit_and_the_largest_rests_round_up():
    shares = [Fraction(1, 3), Fraction(1, 6), Fraction(1, 2)]
    assert rounded(shares, 10) == [3, 2, 5]
    assert sum(rounded([Fraction(1, 7)] * 7, module.FINEST)) == module.FINEST
