"""Whose turn it is: from shares of the sources to the source of each position of a run.

The chairman assignment (Tijdeman 1980, "The chairman assignment problem") keeps the number of
windows from each source within 1 - 1 / (2n - 2) of its share of the positions so far, for n
sources and shares that may change with time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
PERIOD = 1 << 14  # positions that are assigned one by one; then they repeat
FINEST = 1 << 36  # largest denominator of shares; times `PERIOD` and 510, it fits into 63 bits


class Phase(NamedTuple):
    """Shares of the sources from a position on."""

    start: int
    shares: tuple[Fraction, ...]  # sum to 1


@dataclass(frozen=True)
class Stretch:
    """Positions from `start` on, which repeat the turns of a period."""

    start: int
    before: Positions  # windows of each source before `start`, (sources,)
    turns: npt.NDArray[np.uint8]  # the source of each position, (period,)
    numbers: npt.NDArray[np.int32]  # how many of its windows the period has before, (period,)
    per_period: Positions  # windows of each source in a period, (sources,)

    @classmethod
    def of(cls, start: int, before: Positions, turns: npt.NDArray[np.uint8]) -> Stretch:
        """Return a stretch that repeats `turns`."""
        per_period = np.bincount(turns, minlength=len(before)).astype(np.int64)
        order = np.argsort(turns, kind="stable")
        numbers = np.empty(len(turns), np.int32)
        first = np.cumsum(per_period) - per_period
        numbers[order] = np.arange(len(turns)) - first[turns[order]]
        return cls(start, before, turns, numbers, per_period)

    def counts(self, position: int) -> Positions:
        """Return how many windows of each source come before `position`, (sources,)."""
        periods, rest = divmod(position - self.start, len(self.turns))
        partial = np.bincount(self.turns[:rest], minlength=len(self.before))
        return self.before + periods * self.per_period + partial


class Turns:
    """The source of each position, and which of its windows it is; constant memory."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        """Assign the turns of `phases`, in order, the first from position 0."""
        self.sources = len(phases[0].shares)
        self.stretches: list[Stretch] = []
        starts = [phase.start for phase in phases]
        if any(0 < start < PERIOD for start in starts):  # lookahead keeps the bound across changes
            self._add(0, _assigned(phases, PERIOD))
        for phase, end in zip(phases, [*starts[1:], None], strict=True):
            start = max(phase.start, PERIOD) if self.stretches else phase.start
            if end is None or end > start:
                common = math.lcm(*(share.denominator for share in phase.shares))
                steady = [Phase(0, phase.shares)]
                self._add(start, _assigned(steady, min(common, PERIOD)))
        self.starts = np.array([stretch.start for stretch in self.stretches])

    def _add(self, start: int, turns: npt.NDArray[np.uint8]) -> None:
        self.stretches.append(Stretch.of(start, self.counts(start), turns))

    def counts(self, position: int) -> Positions:
        """Return how many windows of each source come before `position`, (sources,)."""
        begun = [stretch for stretch in self.stretches if stretch.start <= position]
        if not begun:
            return np.zeros(self.sources, np.int64)
        return begun[-1].counts(position)

    def at(self, positions: Positions) -> tuple[npt.NDArray[np.uint8], Positions]:
        """Return each position's source, and how many of its windows come before, both (N,)."""
        sources = np.empty(len(positions), np.uint8)
        numbers = np.empty_like(positions)
        places = np.searchsorted(self.starts, positions, "right") - 1
        for place in np.unique(places):
            stretch = self.stretches[place]
            inside = places == place
            periods, index = np.divmod(positions[inside] - stretch.start, len(stretch.turns))
            turns = stretch.turns[index]
            sources[inside] = turns
            numbers[inside] = stretch.before[turns] + periods * stretch.per_period[turns]
            numbers[inside] += stretch.numbers[index]
        return sources, numbers


def _assigned(phases: Sequence[Phase], count: int) -> npt.NDArray[np.uint8]:
    """Return the sources of the first `count` positions, by the earliest deadline.

    Source i may take its window j once it is due more than j + 1 / (2n - 2), and must before it is
    due more than j + 1 - 1 / (2n - 2).
    """
    sources = len(phases[0].shares)
    if sources == 1:
        return np.zeros(count, np.uint8)
    due, unit = _due(phases, count)
    least = unit
    due = due * (2 * sources - 2)
    unit = unit * (2 * sources - 2)
    jobs = []
    for source, mine in enumerate(due):
        numbers = np.arange(int(mine[-1]) // unit + 1)
        first = np.searchsorted(mine, numbers * unit + least, "left")
        last = np.searchsorted(mine, (numbers + 1) * unit - least, "right")
        times = zip(first.tolist(), last.tolist(), strict=True)
        jobs += [(earliest, latest, source) for earliest, latest in times if earliest <= count]
    jobs.sort(reverse=True)  # the next one is last
    turns = bytearray()
    waiting: list[tuple[int, int]] = []
    for position in range(1, count + 1):
        while jobs and jobs[-1][0] <= position:
            heapq.heappush(waiting, jobs.pop()[1:])
        turns.append(heapq.heappop(waiting)[1])
    return np.frombuffer(turns, np.uint8)


def _due(phases: Sequence[Phase], count: int) -> tuple[Positions, int]:
    """Return what is due to each source after 0 to `count` positions, (sources, count + 1).

    The second result is the number of units in a window; amounts are counted in these units.
    """
    unit = math.lcm(*(share.denominator for phase in phases for share in phase.shares))
    unit = min(unit, FINEST)
    steps = np.zeros((len(phases[0].shares), count + 1), np.int64)
    ends = [min(phase.start, count) for phase in phases[1:]]
    for phase, (start, end) in zip(phases, pairwise([0, *ends, count]), strict=True):
        steps[:, start + 1 : end + 1] = np.array(rounded(phase.shares, unit))[:, None]
    return steps.cumsum(axis=1), unit


def rounded(shares: Sequence[Fraction], unit: int) -> list[int]:
    """Return `shares` as whole parts of `unit`, which they sum to: the largest rests round up."""
    parts = [share * unit for share in shares]
    integers = [math.floor(part) for part in parts]
    rests = sorted(range(len(parts)), key=lambda place: integers[place] - parts[place])
    for place in rests[: unit - sum(integers)]:
        integers[place] += 1
    return integers
