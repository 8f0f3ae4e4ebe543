import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.loading import permutation
from lockstep.loading.permutation import permute

SEEDS = st.integers(0, 2**64)


def test_the_example_of_the_docstring_runs():
    result = doctest.testmod(permutation)
    assert result.attempted == 1
    assert result.failed == 0


@settings(deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 2**40))
def test_permute_is_a_bijection_of_any_size(size, seed, epoch):
    image = permute(np.arange(size), size, seed, epoch)
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 2**62), SEEDS, st.integers(0, 1000))
def test_permute_stays_inside_and_apart_in_huge_ranges(size, seed, epoch):
    indices = np.unique(np.linspace(0, size - 1, 200).astype(np.int64).clip(0, size - 1))
    image = permute(indices, size, seed, epoch)
    assert image.min() >= 0
    assert image.max() < size
    assert np.unique(image).size == indices.size


def test_permute_is_the_same_on_every_platform():
    first = permute(np.arange(10), 10, seed=1337, epoch=0)
    second = permute(np.arange(10), 10, seed=1337, epoch=1)
    more = permute(np.arange(5), 200, seed=1337, epoch=1)
    huge = permute(np.arange(3), 10**12, seed=2**64, epoch=7)
    assert first.tolist() == [7, 0, 4, 6, 8, 2, 9, 3, 5, 1]
    assert second.tolist() == [4, 5, 8, 3, 1, 9, 0, 2, 7, 6]
    assert more.tolist() == [138, 165, 65, 195, 18]
    assert huge.tolist() == [918016843613, 785076361140, 561217771710]


def test_seeds_and_epochs_are_never_confused():
    indices = np.arange(1000)
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (1 + 5 * 2**32, 0), (1, 5)]
    images = {permute(indices, 1000, seed, epoch).tobytes() for seed, epoch in keys}
    assert len(images) == len(keys)


def chi_square_is_plausible(counts):
    expected, freedom = counts.mean(), counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [5, 8, 13, 64, 100])
def test_every_window_is_equally_likely_at_every_position(size):
    counts = np.zeros((size, size))
    for epoch in range(1000):
        counts[np.arange(size), permute(np.arange(size), size, 0, epoch)] += 1
    for position in (0, 1, size // 2, size - 1):
        assert chi_square_is_plausible(counts[position])


@pytest.mark.parametrize(("size", "orders"), [(4, 24), (5, 120)])
def test_all_orders_of_a_tiny_set_are_equally_likely(size, orders):
    images = [permute(np.arange(size), size, seed, 0).tobytes() for seed in range(100 * orders)]
    counts = np.unique(images, return_counts=True)[1]
    assert counts.size == orders
    assert chi_square_is_plausible(counts)


def is_odd(order):
    return np.linalg.det(np.eye(len(order))[order]) < 0


@pytest.mark.parametrize("size", [5, 12, 16, 64, 127])
def test_orders_of_few_windows_are_as_often_odd_as_even(size):
    odd = sum(is_odd(permute(np.arange(size), size, 7, epoch)) for epoch in range(400))
    assert chi_square_is_plausible(np.array([odd, 400 - odd]))


def test_neighbours_do_not_stay_neighbours():
    image = permute(np.arange(100_000), 100_000, 3, 0)
    correlation = np.corrcoef(image[:-1], image[1:])[0, 1]
    assert abs(correlation) < 0.02
    assert np.mean(np.diff(image) == 1) < 1e-3
