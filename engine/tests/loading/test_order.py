from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.loading.order import CHUNK, RankOrder, Shuffled, eval_parts, spread

FACTORS_OF_24 = [
    (micro, accumulation, 24 // micro // accumulation)
    for micro in (1, 2, 3, 4, 6, 8, 12, 24)
    for accumulation in (1, 2, 3, 4, 6, 8, 12, 24)
    if 24 % (micro * accumulation) == 0
]


def windows(positions, size, seed):
    return Shuffled(size, seed)(positions)


def rank_order(seed, size, *places):
    """Return a rank's order over a shuffled dataset."""
    return RankOrder(Shuffled(size, seed), *places)


def test_each_epoch_shows_every_window_once_and_in_another_order():
    first, second = windows(np.arange(2000), 1000, seed=1).reshape(2, 1000)
    np.testing.assert_array_equal(np.sort(first), np.arange(1000))
    np.testing.assert_array_equal(np.sort(second), np.arange(1000))
    assert np.mean(first == second) < 0.01


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_batch_straddles_epochs_as_single_positions_do(size):
    straddling = windows(np.arange(8, 40).reshape(4, 8), size, seed=5)
    one_by_one = [windows(np.array([p]), size, seed=5)[0] for p in range(8, 40)]
    assert straddling.ravel().tolist() == one_by_one


def micro_batch(order, number):
    """Return the windows of one micro-batch, by definition."""
    step, leaf = divmod(number, order.accumulation)
    block = (step * order.world_size + order.rank) * order.accumulation + leaf
    first = order.start + block * order.micro_size
    return order.order(first + np.arange(order.micro_size))


def global_batch(step, micro, accumulation, world):
    orders = [rank_order(7, 1000, micro, rank, world, accumulation) for rank in range(world)]
    skipped = step * accumulation
    streams = [islice(order, skipped, skipped + accumulation) for order in orders]
    return [places.samples for stream in streams for places in stream]


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "accumulation", "world"), FACTORS_OF_24)
def test_the_global_batch_is_the_same_for_all_divisions(micro, accumulation, world):
    for step in (0, 41, 42):  # step 41 straddles the epochs of 1000 windows
        divided = np.concatenate(global_batch(step, micro, accumulation, world))
        np.testing.assert_array_equal(divided, windows(np.arange(24) + 24 * step, 1000, 7))


def test_ranks_are_disjoint_and_complete_over_an_epoch():
    seen = [batch for step in range(10) for batch in global_batch(step, 5, 4, 5)]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(1000))


@settings(deadline=None, max_examples=30)
@given(*map(st.integers, (1, 0, 0, 0, 1), (9, 5000, 3, 500, 6)))
def test_the_stream_is_the_sequence_of_micro_batches(micro, start, rank, first, accumulation):
    order = rank_order(11, 777, micro, rank, 4, accumulation, start)
    stream = islice(order, first, first + 20)
    for number, places in enumerate(stream, start=first):
        positions = places.first + np.arange(micro)
        np.testing.assert_array_equal(order.order(positions), places.samples)
        np.testing.assert_array_equal(places.samples, micro_batch(order, number))


def test_the_stream_continues_over_the_windows_that_it_draws_at_once():
    order = rank_order(0, 50_000, 512, 0, 1)
    count = CHUNK // 512
    for number, places in enumerate(islice(order, 4 * count)):
        np.testing.assert_array_equal(places.samples, micro_batch(order, number))


@pytest.mark.parametrize(("micro", "accumulation", "world"), FACTORS_OF_24)
def test_after_a_change_of_the_batch_no_sample_is_skipped_or_repeated(micro, accumulation, world):
    seen = 7 * 10  # by steps of another batch size, which 24 doesn't divide
    orders = [rank_order(7, 1000, micro, rank, world, accumulation, seen) for rank in range(world)]
    streams = [iter(order) for order in orders]
    following = [next(stream).samples for stream in streams for _ in range(accumulation)]
    expected = windows(np.arange(seen, seen + 24), 1000, 7)
    np.testing.assert_array_equal(np.concatenate(following), expected)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_evaluation_counts_every_sample_once_at_any_world_size(size, micro, world, whole):
    ranks = [eval_parts(size, micro, rank, world, whole=whole) for rank in range(world)]
    parts = [part for of_rank in ranks for part in of_rank]
    seen = [sample for part in parts for sample in range(*part)]
    assert sorted(seen) == [*range(size)]
    assert all(1 <= part.end - part.first <= micro for part in parts)
    counts = [len(of_rank) for of_rank in ranks]
    assert max(counts) - min(counts) <= 1
    if not whole and micro > 1 and size >= world:
        assert len({*counts}) == 1


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 6))
def test_whole_batches_are_the_same_at_any_world_size(size, micro, world):
    alone = eval_parts(size, micro, 0, 1, whole=True)
    ranks = [eval_parts(size, micro, rank, world, whole=True) for rank in range(world)]
    assert sorted(part for of_rank in ranks for part in of_rank) == alone


def test_evaluation_goes_through_the_samples_in_sequence():
    assert eval_parts(10, 2, 0, 2, whole=True) == [(0, 2), (4, 6), (8, 10)]
    assert eval_parts(10, 2, 1, 2, whole=True) == [(2, 4), (6, 8)]
    assert eval_parts(10, 4, 1, 2, whole=False) == [(2, 5), (7, 10)]


@given(st.integers(1, 400), st.data())
def test_samples_are_spread_evenly(size, data):
    count = data.draw(st.integers(1, size))
    expected = [number * size // count for number in range(count)]
    assert spread(np.arange(count), size, count).tolist() == expected


def test_samples_spread_without_overflow():
    assert spread(np.arange(3), 2**61, 3).tolist() == [0, 2**61 // 3, 2 * 2**61 // 3]
