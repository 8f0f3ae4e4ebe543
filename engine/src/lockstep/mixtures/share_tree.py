"""A binary tree of sources, chosen so that each source stays near its share.

Every node splits its windows between two sides by rounding, which is off by half a window at most.
A source inherits the rounding of the nodes above it in proportion: with a share w, below nodes of
shares W1 > W2 > ..., it is off by at most (1 + w / W1 + w / W2 + ...) / 2 windows. The root, whose
windows are those of the run, adds nothing. The best tree over the sorted shares has a bound of at
most 1 for up to four sources, and below `MOST` for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

MOST = 1.25  # windows; 1.22 was the largest bound that a search found
LOWEST = 0.5  # of all bounds, in windows
HIGHEST = 1.5
HALVINGS = 8  # of the interval of bounds; the first tries 1


@dataclass(frozen=True)
class Leaf:
    """One source, by its number."""

    source: int


@dataclass(frozen=True)
class Node:
    """Two sides that divide the windows of this node."""

    left: Node | Leaf
    right: Node | Leaf
    left_sources: tuple[int, ...]
    sources: tuple[int, ...]


def share_tree(shares: Sequence[Fraction]) -> Node | Leaf:
    """Return a tree of the sources whose share is not zero, with the smallest bound found."""
    sources = sorted((i for i, share in enumerate(shares) if share), key=lambda i: shares[i])
    weights = np.array([float(shares[source]) for source in sources])
    best = _best_cuts(weights)
    return _tree_of(sources, best, 0, len(sources))


def _tree_of(sources: list[int], cuts: npt.NDArray[np.int64], first: int, end: int) -> Node | Leaf:
    if end - first == 1:
        return Leaf(sources[first])
    cut = int(cuts[first, end])
    return Node(
        left=_tree_of(sources, cuts, first, cut),
        right=_tree_of(sources, cuts, cut, end),
        left_sources=tuple(sources[first:cut]),
        sources=tuple(sources[first:end]),
    )


def _best_cuts(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return where to cut each range of the sorted sources, (sources, sources + 1)."""
    low = LOWEST
    high = HIGHEST
    cuts = _cuts_within(weights, high)[1]
    for _ in range(HALVINGS):
        bound = (low + high) / 2
        is_possible, cuts_within = _cuts_within(weights, bound)
        if is_possible:
            high = bound
            cuts = cuts_within
        else:
            low = bound
    return cuts


def _cuts_within(
    weights: npt.NDArray[np.float64], bound: float
) -> tuple[bool, npt.NDArray[np.int64]]:
    """Return whether a tree keeps all sources within `bound` windows, and its cuts.

    `slack[i, j]` is the largest sum of 1 / W over the nodes above the range from i to j that leaves
    all of its sources within the bound.
    """
    count = len(weights)
    totals = np.concatenate([[0.0], weights.cumsum()])
    slack = np.full((count, count + 1), -np.inf)
    cuts = np.zeros((count, count + 1), np.int64)
    slack[np.arange(count), np.arange(1, count + 1)] = (2 * bound - 1) / weights
    for length in range(2, count + 1):
        firsts = np.arange(count - length + 1)[:, None]
        ends = firsts + length
        candidates = firsts + np.arange(1, length)
        slacks = np.minimum(slack[firsts, candidates], slack[candidates, ends])
        best = slacks.argmax(axis=1)
        first = firsts[:, 0]
        end = ends[:, 0]
        cuts[first, end] = first + 1 + best
        above = 1 / (totals[end] - totals[first])
        if length == count:
            above[:] = 0  # the root's windows are those of the run
        slack[first, end] = slacks.max(axis=1) - above
    return bool(slack[0, count] >= -1e-9), cuts
