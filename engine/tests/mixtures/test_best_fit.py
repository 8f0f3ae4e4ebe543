"""Windows packed from documents: which tokens they have."""

import numpy as np
import pytest

from lockstep.mixtures import best_fit as placing
from lockstep.mixtures.best_fit import (
    best_fit,
    ends_of_documents,
    windows_of,
)


def one_by_one(lengths, size):
    """Best-fit decreasing as textbooks write it; return how full the bins are."""
    free = []
    for length in sorted(lengths, reverse=True):
        fits = [space for space in free if space >= length]
        space = min(fits) if fits else size
        if fits:
            free.remove(space)
        free.append(space - length)
    return sorted(free)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_fills_bins_as_if_pieces_came_one_by_one(seed):
    draw = np.random.default_rng(seed)
    size = int(draw.integers(1, 60))
    lengths = draw.integers(1, size + 1, int(draw.integers(0, 300)))
    bins, made = best_fit(lengths, size)
    filled = np.bincount(bins, weights=lengths, minlength=made)
    assert filled.max(initial=0) <= size
    assert sorted(size - filled) == one_by_one(lengths.tolist(), size)


def tokens_of(lengths, draw, *, ended=True):
    """Return documents of these lengths; 0 ends each."""
    tokens = draw.integers(1, 50, sum(lengths)).astype(np.uint8)
    tokens[np.cumsum(lengths) - 1] = 0
    return tokens if ended else tokens[:-1]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_each_token_but_the_last_is_in_one_window_and_only_a_cut_splits_documents(seed, ended):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, [3, 10, 40, 90][seed % 4], 200).tolist()
    tokens = tokens_of(lengths, draw, ended=ended)
    size = 16
    starts, sizes, first, facts = windows_of(ends_of_documents(tokens, 0), size)
    seen = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
    assert sorted(seen) == [*range(len(tokens) - 1)]
    begins = {0, *(np.flatnonzero(tokens == 0) + 1).tolist()}
    unbroken = 0
    for window in range(facts.windows):
        pieces = range(first[window], first[window + 1])
        assert 0 < sum(sizes[pieces.start : pieces.stop]) <= size
        for piece in pieces[:-1]:  # what follows is another document, also for the mask
            assert tokens[starts[piece] + sizes[piece] - 1] == 0
        heads = [starts[piece] in begins for piece in pieces]
        assert heads == sorted(heads, reverse=True) or starts[pieces[-1]] + sizes[pieces[-1]] == (
            len(tokens) - 1
        )
        unbroken += heads[0]
    assert facts.whole == unbroken
    assert facts.padding == facts.windows * size - len(tokens) + 1


def test_ends_are_found_across_the_parts_that_are_searched(monkeypatch):
    tokens = tokens_of([3, 1, 1, 7, 2], np.random.default_rng(0))
    monkeypatch.setattr(placing, "SCANNED", 4)
    assert ends_of_documents(tokens, 0).tolist() == [3, 4, 5, 12, 14]
    assert ends_of_documents(tokens[:-1], 0).tolist() == [3, 4, 5, 12, 13]
