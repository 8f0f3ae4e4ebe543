from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_gpt.data.order import (
    CHUNK,
    Order,
    validation_rows,
    windows,
)

FACTORS_OF_24 = [
    (micro, accumulation, 24 // micro // accumulation)
    for micro in (1, 2, 3, 4, 6, 8, 12, 24)
    for accumulation in (1, 2, 3, 4, 6, 8, 12, 24)
    if 24 % (micro * accumulation) == 0
]


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
    return windows(first + np.arange(order.micro_size), order.size, order.seed)


def global_batch(step, micro, accumulation, world):
    orders = [Order(7, 1000, micro, rank, world, accumulation) for rank in range(world)]
    skipped = step * accumulation
    streams = [islice(order, skipped, skipped + accumulation) for order in orders]
    return [batch for stream in streams for batch in stream]


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
    order = Order(11, 777, micro, rank, 4, accumulation, start)
    stream = islice(order, first, first + 20)
    for number, batch in enumerate(stream, start=first):
        np.testing.assert_array_equal(batch, micro_batch(order, number))


def test_the_stream_continues_over_the_windows_that_it_draws_at_once():
    order = Order(0, 50_000, 512, 0, 1)
    count = CHUNK // 512
    for number, batch in enumerate(islice(order, 3 * count)):
        np.testing.assert_array_equal(batch, micro_batch(order, number))


@pytest.mark.parametrize(("micro", "accumulation", "world"), FACTORS_OF_24)
def test_after_a_change_of_the_batch_no_sample_is_skipped_or_repeated(micro, accumulation, world):
    seen = 7 * 10  # by steps of another batch size, which 24 doesn't divide
    orders = [Order(7, 1000, micro, rank, world, accumulation, seen) for rank in range(world)]
    streams = [iter(order) for order in orders]
    following = [next(stream) for stream in streams for _ in range(accumulation)]
    expected = windows(np.arange(seen, seen + 24), 1000, 7)
    np.testing.assert_array_equal(np.concatenate(following), expected)


@settings(deadline=None)
@given(st.integers(1, 400), st.data(), st.integers(1, 9), st.integers(1, 6))
def test_validation_counts_every_window_once_at_any_world_size(size, data, micro, world):
    count = data.draw(st.integers(1, size))
    ranks = [validation_rows(size, count, micro, rank, world) for rank in range(world)]
    assert len({rows.shape for rows in ranks}) == 1
    assert ranks[0].shape[1] == micro
    seen = np.concatenate([rows.ravel() for rows in ranks])
    expected = [number * size // count for number in range(count)]
    assert np.sort(seen[seen >= 0]).tolist() == expected


def test_validation_goes_through_the_split_in_sequence():
    assert validation_rows(10, 10, 2, 0, 2).tolist() == [[0, 1], [4, 5], [8, 9]]
    assert validation_rows(10, 10, 2, 1, 2).tolist() == [[2, 3], [6, 7], [-1, -1]]


def test_validation_spreads_without_overflow():
    rows = validation_rows(2**61, 3, 1, 0, 1)
    assert rows.ravel().tolist() == [0, 2**61 // 3, 2 * 2**61 // 3]
