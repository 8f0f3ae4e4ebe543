import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.loading.permutation import permute


@pytest.fixture(scope="module", name="sampler_of")
def sampler_class():
    ladder = str(Path(__file__).parents[4] / "lab/ladder")
    sys.path.insert(0, ladder)
    try:
        from sampler import EpochSampler
    finally:
        sys.path.remove(ladder)
    return EpochSampler


@settings(deadline=None)
@given(st.integers(1, 9000), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_the_sampler_divides_an_epoch_equally_among_ranks(
    sampler_of, size, world, micro, epoch, drop_last
):
    samplers = [sampler_of(size, 3, rank, world, micro, drop_last) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    turns = size // (world * micro) if drop_last else -(-size // (world * micro))
    assert [len(sampler) for sampler in samplers] == [turns * micro] * world
    seen = np.array([list(sampler) for sampler in samplers], dtype=np.int64)
    together = seen.reshape(world, turns, micro).transpose(1, 0, 2).ravel()
    order = permute(np.arange(size), size, 3, epoch)
    np.testing.assert_array_equal(together, np.resize(order, turns * micro * world))


def test_the_sampler_starts_an_epoch_of_a_trillion_windows_immediately(sampler_of):
    sampler = sampler_of(10**12, 0, rank=7, world_size=1000)
    expected = permute(np.array([7, 1007]), 10**12, 0, 0)
    assert (len(sampler), [*islice(sampler, 2)]) == (10**9, expected.tolist())
