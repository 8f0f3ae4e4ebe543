"""Whose turn it is: from shares of the sources to the source of each position of a run.

A tree of the sources divides the positions: of the first m windows of a node, the left side has
floor(r m + offset), where r is its part of the node's share, and the offset is one half. So the
source is a function of the position alone, in exact integer arithmetic, for runs of any length.

The tree is binary, and chosen so that each source stays near its share. Every node splits its
windows between two sides by rounding, which is off by half a window at most. A source inherits the
rounding of the nodes above it in proportion: with a share w, below nodes of shares W1 > W2 > ...,
it is off by at most (1 + w / W1 + w / W2 + ...) / 2 windows. The root, whose windows are those of
the run, adds nothing. The best tree over the sorted shares has a bound of at most 1 for up to four
sources, and below `MOST` for more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Counts = list[int]  # windows of each source
Amounts = list[Fraction]  # windows due to each source
LARGEST = 1 << 31  # denominator of a side's part: its square fits into 63 bits
HALF = Fraction(1, 2)
MOST = 1.25  # windows; 1.22 was the largest bound that a search found
LOWEST = 0.5  # of all bounds, in windows
HIGHEST = 1.5
HALVINGS = 8  # of the interval of bounds; the first tries 1


class Phase(NamedTuple):
    """Shares of the sources from a position on."""

    start: int
    shares: tuple[Fraction, ...]  # sum to 1


class Turns:
    """The source of each position, and which of its windows it is; constant memory."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        """Divide the positions of `phases`, in order, the first from position 0."""
        self.stretches: list[Stretch] = []
        counts = [0] * len(phases[0].shares)
        due = [Fraction(0)] * len(counts)
        for phase in _changes(phases):
            if self.stretches:
                last = self.stretches[-1]
                counts = last.counts(phase.start)
                due = last.due(phase.start)
            self.stretches.append(Stretch(phase, counts, due))
        self._starts = np.array([stretch.phase.start for stretch in self.stretches])

    def counts(self, position: int) -> Counts:
        """Return how many windows of each source come before `position`."""
        begun = [stretch for stretch in self.stretches if stretch.phase.start <= position]
        return begun[-1].counts(position)

    def at(self, positions: Positions) -> tuple[npt.NDArray[np.uint8], Positions]:
        """Return each position's source, and how many of its windows come before, both (N,)."""
        sources = np.empty(len(positions), np.uint8)
        numbers = np.empty_like(positions)
        places = np.searchsorted(self._starts, positions, "right") - 1
        for place in np.unique(places):
            inside = places == place
            sources[inside], numbers[inside] = self.stretches[place].at(positions[inside])
        return sources, numbers

    def phases_before(self, position: int) -> list[Phase]:
        """Return the phases that decide the turns before `position`."""
        phases = [stretch.phase for stretch in self.stretches]
        return [phase for phase in phases if phase.start < position]


def _changes(phases: Sequence[Phase]) -> list[Phase]:
    """Leave out phases that end where they start, and those that change no share."""
    changes: list[Phase] = []
    for phase in phases:
        if changes and changes[-1].start == phase.start:
            changes.pop()
        if not changes or changes[-1].shares != phase.shares:
            changes.append(phase)
    return changes


@dataclass
class Sides:
    """How each node divides its windows; a leaf gives all of them to itself, (nodes,) each."""

    part: list[int] = field(default_factory=list)  # of `whole`: the left side's part of the windows
    whole: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)  # in units of 1 / whole
    left: list[int] = field(default_factory=list)  # the nodes of both sides
    right: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)  # of a leaf

    def add(self, part: int, whole: int, offset: int, source: int) -> int:
        """Add a node whose sides are itself; return its number."""
        number = len(self.part)
        self.part.append(part)
        self.whole.append(whole)
        self.offset.append(offset)
        self.left.append(number)
        self.right.append(number)
        self.source.append(source)
        return number


class Stretch:
    """Positions from the start of one phase on."""

    def __init__(self, phase: Phase, counts: Counts, due: Amounts) -> None:
        """Continue after `counts` windows of each source, where `due` would be exact."""
        self.phase = phase
        self._counts = counts
        self._due = due
        self._depth = 0
        self._sides = Sides()
        self._add(share_tree(phase.shares), depth=0)
        sides = self._sides
        self._part = np.array(sides.part)
        self._whole = np.array(sides.whole)
        self._offset = np.array(sides.offset)
        self._left = np.array(sides.left)
        self._right = np.array(sides.right)
        self._source = np.array(sides.source)
        self._before = np.array(counts, np.int64)

    def _add(self, node: Node | Leaf, depth: int) -> int:
        self._depth = max(self._depth, depth)
        if isinstance(node, Leaf):
            return self._sides.add(1, 1, 0, node.source)
        ratio = self._share(node.left_sources) / self._share(node.sources)
        ratio = ratio.limit_denominator(LARGEST)
        # What the left side is ahead of its part of the node's windows, from earlier phases.
        ahead = self._ahead(node.left_sources) - ratio * self._ahead(node.sources)
        offset = math.floor((HALF - ahead) * ratio.denominator)
        offset = min(max(offset, 0), ratio.denominator - 1)
        number = self._sides.add(ratio.numerator, ratio.denominator, offset, -1)
        self._sides.left[number] = self._add(node.left, depth + 1)
        self._sides.right[number] = self._add(node.right, depth + 1)
        return number

    def _share(self, sources: Collection[int]) -> Fraction:
        return sum((self.phase.shares[source] for source in sources), Fraction(0))

    def _ahead(self, sources: Collection[int]) -> Fraction:
        differences = (self._counts[source] - self._due[source] for source in sources)
        return sum(differences, Fraction(0))

    def due(self, position: int) -> Amounts:
        """Return how many windows of each source are due before `position`, exactly."""
        length = position - self.phase.start
        pairs = zip(self._due, self.phase.shares, strict=True)
        return [amount + share * length for amount, share in pairs]

    def counts(self, position: int) -> Counts:
        """Return how many windows of each source come before `position`."""
        counts = [*self._counts]
        sides = self._sides
        waiting = [(0, position - self.phase.start)]
        while waiting:
            number, windows = waiting.pop()
            if sides.source[number] >= 0:
                counts[sides.source[number]] += windows
                continue
            of_left = sides.part[number] * windows + sides.offset[number]
            of_left //= sides.whole[number]
            waiting.append((sides.left[number], of_left))
            waiting.append((sides.right[number], windows - of_left))
        return counts

    def at(self, positions: Positions) -> tuple[Positions, Positions]:
        """Return each position's source, and how many of its windows come before, both (N,)."""
        windows = positions - self.phase.start
        numbers = np.zeros_like(windows)
        for _ in range(self._depth):
            part = self._part[numbers]
            whole = self._whole[numbers]
            # floor((part * windows + offset) / whole), in two parts: the product may overflow
            rounds, rest = np.divmod(windows, whole)
            more, fraction = np.divmod(part * rest + self._offset[numbers], whole)
            of_left = part * rounds + more
            is_left = fraction + part >= whole
            windows = np.where(is_left, of_left, windows - of_left)
            numbers = np.where(is_left, self._left[numbers], self._right[numbers])
        sources = self._source[numbers]
        return sources, self._before[sources] + windows


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
