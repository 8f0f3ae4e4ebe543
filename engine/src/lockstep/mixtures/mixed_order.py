"""Which source and window each position of a run takes.

Weights and epochs decide each source's share of the windows, exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError
from lockstep.loading.order import Positions, Shuffled
from lockstep.loading.permutation import FEW, Words, feistel, round_keys
from lockstep.mixtures.turns import Phase, Turns

RULE = "share tree"  # by which the sources take turns


def phases(
    weights: Mapping[str, float],
    epochs: Mapping[str, float],
    schedule: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    planned: int,
) -> list[Phase]:
    """Return the shares of the sources, in the order of `sizes`, over a run.

    Args:
        weights: `data.source.weights`.
        epochs: `data.source.epochs`.
        schedule: `data.source.schedule`.
        sizes: training windows of each source, by name.
        planned: windows of the run, as far as epochs and schedule are concerned.

    Raises:
        UserError: the epochs take more windows than the run has.
    """
    fixed = {name: exact(epochs[name]) * sizes[name] / planned for name in epochs}
    rest = 1 - sum(fixed.values())
    if not weights:
        total = sum(fixed.values())
        return [Phase(0, tuple(fixed[name] / total for name in sizes))]
    if fixed and rest <= 0:
        needed = round(sum(fixed.values()) * planned)
        raise UserError(
            f"data.source.epochs takes {needed:,} windows, and the run has {planned:,}, some of "
            "them for sources with weights; lower the epochs, or train longer"
        )
    later = [(round(exact(change["from"]) * planned), change["weights"]) for change in schedule]
    result = []
    for start, weights_of_phase in [(0, weights), *later]:
        total = sum(map(exact, weights_of_phase.values()))
        weighted = {name: rest * exact(weight) / total for name, weight in weights_of_phase.items()}
        shares = {**dict.fromkeys(sizes, Fraction(0)), **fixed, **weighted}
        result.append(Phase(start, tuple(shares[name] for name in sizes)))
    return result


def exact(number: float) -> Fraction:
    """Return a number as it was typed: 0.7 is 7/10."""
    return Fraction(str(number))


class MixedOrder:
    """The window of each position: whose turn it is, and which of its windows comes next.

    A pure function of seed, shares, sizes, and position. Each source has its own permutation in
    each of its epochs; its name, not the other sources, decides it.
    """

    def __init__(
        self, sizes: Mapping[str, int], phases: Sequence[Phase], seed: int, planned_tokens: int = 0
    ) -> None:
        """Divide the positions of a run among sources.

        Args:
            sizes: each source's training windows.
            phases: the shares of sources over the run.
            seed: of the run.
            planned_tokens: for which epochs and schedule are meant.
        """
        self.planned_tokens = planned_tokens
        self.sizes = dict(sizes)
        self.seeds = [seed_of(seed, name) for name in sizes]
        self.phases = phases
        self.turns = Turns(self.phases)
        self._sizes = np.array([*sizes.values()])
        self._bits = np.array([(size - 1).bit_length() for size in sizes.values()])
        self._first = np.cumsum(self._sizes) - self._sizes

    def __call__(self, positions: Positions) -> Positions:
        """Return the window at each of `positions`, any shape, numbered over all sources."""
        sources, numbers = self.turns.at(positions.ravel())
        sizes = self._sizes[sources]
        result = np.empty_like(numbers)
        for place in np.flatnonzero(self._sizes < FEW):
            of_source = sources == place
            size = int(self._sizes[place])
            result[of_source] = Shuffled(size, self.seeds[place])(numbers[of_source])
        large = np.flatnonzero(sizes >= FEW)
        epochs = numbers[large] // sizes[large]
        for epoch in np.unique(epochs).tolist():
            rows = large[epochs == epoch]
            keys = np.stack([round_keys(source_seed, epoch) for source_seed in self.seeds], axis=1)
            offsets = numbers[rows] - epoch * sizes[rows]
            result[rows] = self._permute(offsets, sources[rows], keys)
        total: Positions = result + self._first[sources]
        return total.reshape(positions.shape)

    def _permute(
        self, offsets: Positions, sources: npt.NDArray[np.uint8], keys: Words
    ) -> Positions:
        """Return `permute` of the sources' offsets, all (N,), by their keys, (8, sources).

        A call of it for each source would cost more than the rest of the order.
        """
        sizes = self._sizes[sources]
        bits = self._bits[sources]
        keys_of_rows = keys[:, sources]
        result = offsets.astype(np.uint64)
        outside = np.arange(len(offsets))
        while outside.size:
            moved = feistel(result[outside], bits[outside], keys_of_rows[:, outside])
            result[outside] = moved
            outside = outside[moved >= sizes[outside]]
        return result.astype(np.int64)

    def counts(self, position: int) -> dict[str, int]:
        """Return how many windows of each source come before `position`."""
        return dict(zip(self.sizes, self.turns.counts(position), strict=True))

    def epochs(self, position: int) -> dict[str, float]:
        """Return how often each source was taken before `position`."""
        return {name: count / self.sizes[name] for name, count in self.counts(position).items()}

    def past(self, samples: int) -> dict[str, Any]:
        """Return, as plain values, what decides the windows before the position `samples`."""
        before = self.turns.phases_before(samples)
        return {
            "rule": RULE,
            "samples": samples,
            "planned_tokens": self.planned_tokens,
            "phases": [[phase.start, [*map(str, phase.shares)]] for phase in before],
        }

    def refuse_other_past(self, past: dict[str, Any]) -> None:
        """Raise a `UserError` if the run would have taken other windows so far."""
        if past.get("rule") != RULE:
            raise UserError(
                "the sources of this run took turns by the rule of another version; finish it with "
                "that version, or start a new run"
            )
        if self.past(past["samples"])["phases"] != past["phases"]:
            raise UserError(
                "with these weights, epochs, schedule, and max_steps of the mixture, the run would "
                "have taken other windows so far; set them to the same, "
                f"data.source.planned_tokens={past['planned_tokens']} to train longer, "
                "data.source.schedule for later weights, or resume_force=true"
            )


@cache
def seed_of(seed: int, name: str) -> int:
    """Return the seed of a source's permutations."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
