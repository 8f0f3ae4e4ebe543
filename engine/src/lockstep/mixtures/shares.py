"""From weights and epochs to each source's share of the windows, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lockstep.errors import UserError
from lockstep.mixtures.turns import Phase


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
