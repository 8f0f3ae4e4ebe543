"""Shares are exact, at any position and across changes; a tree keeps each source near its own."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.mixtures.turns import MOST, Leaf, Phase, Turns, share_tree

PREFIX = 3_000
FEW = 4  # sources up to which each has its share to one window


def phases_of(tables, starts=(0,)):
    return [Phase(start, shares_of(weights)) for start, weights in zip(starts, tables, strict=True)]


def shares_of(weights):
    total = sum(Fraction(str(weight)) for weight in weights)
    return tuple(Fraction(str(weight)) / total for weight in weights)


def counts_of_prefixes(turns, sources, count):
    """Return how many windows each source has before each position, (sources, count + 1)."""
    taken = np.zeros((sources, count + 1), np.int64)
    taken[turns.at(np.arange(count))[0], np.arange(1, count + 1)] = 1
    return taken.cumsum(axis=1)


def due_of_prefixes(phases, count):
    steps = np.zeros((len(phases[0].shares), count + 1))
    for phase in phases:
        steps[:, phase.start + 1 :] = np.array([*map(float, phase.shares)])[:, None]
    return steps.cumsum(axis=1)


def largest_error(phases, count):
    """Return by how many windows a source is off its exact share, before position `count`."""
    counts = Turns(phases).counts(count)
    assert sum(counts) == count
    due = [Fraction(0)] * len(counts)
    ends = [*(min(phase.start, count) for phase in phases[1:]), count]
    for phase, end in zip(phases, ends, strict=True):
        length = max(0, end - phase.start)
        due = [amount + share * length for amount, share in zip(due, phase.shares, strict=True)]
    return max(abs(taken - amount) for taken, amount in zip(counts, due, strict=True))


def bound_of(sources):
    return 1 if sources <= FEW else MOST


weight = st.floats(1e-6, 1, allow_subnormal=False) | st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 7])
position = st.integers(1, 10**9)


@given(st.lists(weight, min_size=1, max_size=12))
def test_each_prefix_has_each_share(weights):
    phases = phases_of([weights])
    counts = counts_of_prefixes(Turns(phases), len(weights), PREFIX)
    errors = np.abs(counts - due_of_prefixes(phases, PREFIX))
    assert errors.max() <= bound_of(len(weights)) + 1e-9


@given(st.lists(weight, min_size=1, max_size=12), position)
def test_any_length_has_each_share_of_weights(weights, length):
    assert largest_error(phases_of([weights]), length) <= bound_of(len(weights))


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from([1, 2, 3, Fraction(1, 2)]))
def test_any_size_is_taken_as_often_as_its_epochs_say(size, others, epochs):
    length = 3 * size + others
    share = epochs * Fraction(size, length)
    turns = Turns([Phase(0, (share, (1 - share) / 3, (1 - share) * 2 / 3))])
    assert abs(turns.counts(length)[0] - epochs * size) <= 1


@pytest.mark.parametrize(
    ("size", "epochs", "run"),
    [(5_000, 1, 300_000_000), (5_000, 2, 300_000_000), (400, 1, 10_000_000)],
)
def test_a_small_source_of_a_long_run_has_its_epochs(size, epochs, run):
    share = Fraction(epochs * size, run)
    assert Turns([Phase(0, (share, 1 - share))]).counts(run)[0] == epochs * size


def test_a_small_weight_is_a_share_of_a_long_run():
    assert Turns(phases_of([(1, 49_999)])).counts(10_000_000)[0] == 200


@pytest.mark.slow
@given(st.data())
def test_changes_do_not_add_up(data):
    sources = data.draw(st.integers(2, 6))
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 10**9), max_size=20)))]
    table = st.lists(weight, min_size=sources, max_size=sources)
    phases = phases_of([data.draw(table) for _ in starts], starts)
    ends = [start + data.draw(st.integers(0, 10**6)) for start in starts]
    bound = 2 if sources > 2 else Fraction(1, 2) + Fraction(1, 10**6)
    assert max(largest_error(phases, end) for end in ends) <= bound


def test_two_phases_with_the_same_shares_are_one():
    one = Turns(phases_of([(1, 2, 4)]))
    two = Turns(phases_of([(1, 2, 4), (0.1, 0.2, 0.4)], (0, 1000)))
    for part, other in zip(one.at(np.arange(3000)), two.at(np.arange(3000)), strict=True):
        assert part.tolist() == other.tolist()
    assert one.phases_before(2000) == two.phases_before(2000)


def test_a_source_may_be_absent_for_a_while():
    phases = phases_of([(1, 1, 0), (0, 1, 3), (1, 0, 0)], (0, 500, 900))
    counts = counts_of_prefixes(Turns(phases), 3, 2000)
    assert counts[2, 500] == 0
    assert counts[0, 900] == counts[0, 500]
    assert counts[0, 2000] - counts[0, 900] == 1100


def test_shares_of_few_digits_never_drift():
    turns = Turns(phases_of([(0.7, 0.2, 0.1)]))
    assert turns.counts(10**15) == [7 * 10**14, 2 * 10**14, 10**14]


@given(st.lists(weight, min_size=1, max_size=12), st.integers(0, 10**12))
def test_counts_and_turns_agree_at_any_position(weights, start):
    assert_counts_and_turns_agree(Turns(phases_of([weights])), start, start + 200)


def test_counts_continue_across_phases():
    starts = (0, 100, 16_000, 17_000, 50_000)
    turns = Turns(phases_of([(1, 2), (3, 1), (1, 1), (5, 1), (1, 7)], starts))
    for first, last in pairwise([0, 50, 150, 15_950, 16_050, 49_900, 50_100]):
        assert_counts_and_turns_agree(turns, first, last)


def assert_counts_and_turns_agree(turns, first, last):
    sources, numbers = turns.at(np.arange(first, last))
    before = turns.counts(first)
    for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
        assert number == before[source]
        before[source] += 1
    assert before == turns.counts(last)


def test_several_phases_may_start_at_one_position():
    turns = Turns(phases_of([(1, 0), (1, 1), (0, 1)], (0, 0, 0)))
    assert turns.at(np.arange(10))[0].tolist() == [1] * 10


def bounds(shares, node, above=0):
    """Yield by how many windows each source of a tree may be off its share, as the module says."""
    if isinstance(node, Leaf):
        yield (1 + shares[node.source] * above) / 2
        return
    for side in (node.left, node.right):
        sources = (side.source,) if isinstance(side, Leaf) else side.sources
        total = sum(shares[source] for source in sources)
        is_leaf = isinstance(side, Leaf)
        yield from bounds(shares, side, above if is_leaf else above + 1 / total)


def sources_of(node):
    if isinstance(node, Leaf):
        return [node.source]
    assert sorted(node.sources) == sorted(sources_of(node.left) + sources_of(node.right))
    assert sorted(node.left_sources) == sorted(sources_of(node.left))
    return sorted(node.sources)


weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


@given(weights)
def test_every_source_is_within_the_bound(numbers):
    shares = [Fraction(number, sum(numbers)) for number in numbers]
    tree = share_tree(shares)
    assert sources_of(tree) == [*range(len(numbers))]
    largest = max(bounds(shares, tree))
    assert largest <= (1 if len(numbers) <= 4 else MOST)


@given(weights, weights)
def test_sources_without_a_share_are_left_out(present, absent):
    shares = [Fraction(number, sum(present)) for number in present]
    tree = share_tree([Fraction(0)] * len(absent) + shares)
    assert sources_of(tree) == [*range(len(absent), len(absent) + len(present))]


def test_255_sources_are_within_the_bound():
    numbers = [1 + (number * 7919) % 1000 for number in range(255)]
    shares = [Fraction(number, sum(numbers)) for number in numbers]
    assert max(bounds(shares, share_tree(shares))) <= MOST
