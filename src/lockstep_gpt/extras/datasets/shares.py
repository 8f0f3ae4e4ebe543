"""From weights and epochs to each source's share of the windows, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from lockstep_gpt.config import UserError
from lockstep_gpt.extras.mixtures.mixture_settings import MixtureData
from lockstep_gpt.extras.mixtures.turns import Phase


def phases(data: MixtureData, sizes: Mapping[str, int], planned: int) -> list[Phase]:
    """Return the shares of the sources, in the order of `sizes`, over a run.

    Args:
        data: the settings.
        sizes: training windows of each source, by name.
        planned: windows of the run, as far as epochs and schedule are concerned.

    Raises:
        UserError: the epochs take more windows than the run has.
    """
    fixed = {name: exact(data.epochs[name]) * sizes[name] / planned for name in data.epochs}
    rest = 1 - sum(fixed.values())
    if not data.weights:
        total = sum(fixed.values())
        return [Phase(0, tuple(fixed[name] / total for name in sizes))]
    if fixed and rest <= 0:
        needed = round(sum(fixed.values()) * planned)
        raise UserError(
            f"data.epochs takes {needed:,} windows, and the run has {planned:,}, some of them for "
            "sources with weights; lower the epochs, or train longer"
        )
    later = [(round(exact(each["from"]) * planned), each["weights"]) for each in data.schedule]
    found = []
    for start, weights in [(0, data.weights), *later]:
        total = sum(map(exact, weights.values()))
        share = {name: rest * exact(weight) / total for name, weight in weights.items()}
        shares = {**dict.fromkeys(sizes, Fraction(0)), **fixed, **share}
        found.append(Phase(start, tuple(shares[name] for name in sizes)))
    return found


def exact(number: float) -> Fraction:
    """Return a number as it was typed: 0.7 is 7/10."""
    return Fraction(str(number))
