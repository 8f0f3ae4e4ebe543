"""A comparison so far: the numbers of all runs, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.evidence.intervals import Interval
from lockstep.evidence.sides import Runs, Side
from lockstep.evidence.verdicts import OPEN, Judge, Verdict, rounded


@dataclass
class Comparison:
    """One measure of all sides; the first side is the base.

    Attributes:
        judge: how it decides.
        sides: the base and the variants.
        numbers: the measure of each side's runs, by seed.
    """

    judge: Judge
    sides: Sequence[Side]
    numbers: Sequence[dict[int, float]]

    @classmethod
    def of_runs(cls, judge: Judge, sides: Sequence[Side], groups: Sequence[Runs]) -> Comparison:
        """Return the comparison of finished runs, or raise a `UserError` for one without number."""
        numbers = [{seed: judge.measure.of(run) for seed, run in runs.items()} for runs in groups]
        return cls(judge, sides, numbers)

    @property
    def base(self) -> Side:
        """The side that all others are compared with."""
        return self.sides[0]

    def seeds_of(self, variant: int) -> list[int]:
        """Return the seeds of a variant's pairs, in order; `variant` is its place in `sides`."""
        return sorted({*self.numbers[0]} & {*self.numbers[variant]})

    def columns(self, variant: int) -> tuple[list[float], list[float]]:
        """Return the numbers of base and variant, pair by pair."""
        seeds = self.seeds_of(variant)
        base, ours = ([self.numbers[side][seed] for seed in seeds] for side in (0, variant))
        return base, ours

    def verdicts(self) -> dict[int, Verdict]:
        """Return the verdict on each variant that has a pair, by its place in `sides`."""
        found = {}
        for variant in range(1, len(self.sides)):
            base, ours = self.columns(variant)
            if ours:
                name = self.sides[variant].name
                found[variant] = self.judge.verdict(self.base.name, name, base, ours)
        return found

    def open_variants(self) -> list[int]:
        """Return the places of the variants without an answer."""
        verdicts = self.verdicts()
        answers = {place: verdict.answer for place, verdict in verdicts.items()}
        return [place for place in range(1, len(self.sides)) if answers.get(place, OPEN) == OPEN]

    def missing_seeds(self, variants: Sequence[int], seeds: Sequence[int]) -> list[int]:
        """Return the seeds that have no pair yet of one of these variants."""
        present = [{*self.seeds_of(variant)} for variant in variants]
        return [seed for seed in seeds if any(seed not in of_variant for of_variant in present)]

    def history(self, variant: int) -> list[Interval]:
        """Return the interval of a variant after each of its pairs."""
        base, ours = self.columns(variant)
        counts = range(1, len(ours) + 1)
        return [self.judge.interval(base[:count], ours[:count]) for count in counts]

    def table(self) -> str:
        """Return a row for each seed: the number of each side."""
        seeds = sorted({seed for numbers in self.numbers for seed in numbers})
        names = [side.name for side in self.sides]
        widths = [max(len(name), 12) for name in names]
        rows = [[f"{'seed':>6}", *map(str.rjust, names, widths)]]
        for seed in seeds:
            cells = [self._cell(numbers.get(seed)) for numbers in self.numbers]
            rows.append([f"{seed:6}", *map(str.rjust, cells, widths)])
        return "\n".join("  ".join(row).rstrip() for row in rows)

    def _cell(self, number: float | None) -> str:
        return "" if number is None else rounded(number, math.inf)

    def as_values(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON and the page."""
        variants = []
        for place, verdict in self.verdicts().items():
            interval = verdict.interval
            base, ours = self.columns(place)
            variants.append(
                {
                    "name": self.sides[place].name,
                    "verdict": verdict.text,
                    "answer": verdict.answer,
                    "difference": interval.mean,
                    "low": finite(interval.low),
                    "high": finite(interval.high),
                    "deviation": finite(interval.deviation),
                    "seeds": self.seeds_of(place),
                    "base": base,
                    "variant": ours,
                    "intervals": [
                        [finite(earlier.low), finite(earlier.high)]
                        for earlier in self.history(place)
                    ],
                }
            )
        return {
            "measure": self.judge.measure.name,
            "confidence": 1 - self.judge.error,
            "margin": self.judge.margin,
            "base": self.base.name,
            "variants": variants,
        }


def finite(value: float) -> float | None:
    """Return a number that JSON has; None for those that it lacks."""
    return value if math.isfinite(value) else None
