"""The result of a comparison so far: on the terminal, as JSON, and as a page.

The page is one file of HTML, whose charts are drawings, without any script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from lockstep.evidence import fairness
from lockstep.evidence.fairness import Setting
from lockstep.evidence.runs import Runs, Side
from lockstep.evidence.verdicts import OPEN, Interval, Judge, Verdict, rounded
from lockstep.whole_files import replace_text

RESULT = "compare.json"
PAGE = "compare.html"

WIDE = 640.0  # of a chart, in pixels
HIGH = 220.0
LEFT = 70.0  # for the numbers of the axis
EDGE = 24.0
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .1rem .8rem; border-bottom: 1px solid #8884; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; }
code { overflow-wrap: anywhere; }
.unfair { border-left: 4px solid #c60; padding-left: .8rem; }
:root { color-scheme: light dark; }
"""


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


@dataclass
class Report:
    """All measures of a comparison, and what to say about them.

    Attributes:
        judges: one for each measure; the first decides when the comparison ends.
        sides: the base and the variants.
        warnings: what makes the comparison unfair.
        comparisons: one for each judge, of the runs so far.
    """

    judges: list[Judge]
    sides: list[Side]
    warnings: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def check(self, settings: Sequence[Setting]) -> None:
        """Refuse sides that train the same, and collect what makes them unfair."""
        fairness.refuse_equal(settings)
        self.warnings += fairness.warnings(settings)

    def refuse_other_data(self, settings: Sequence[Setting]) -> None:
        """Raise a `UserError` if sides would train with other data, before they do."""
        for judge in self.judges:
            fairness.refuse_other_data(settings, judge.measure)

    def update(self, groups: Sequence[Runs]) -> Comparison:
        """Read the finished runs; return the comparison of the first measure.

        Raises:
            UserError: their data can't be compared.
        """
        for judge in self.judges:
            fairness.refuse_other_tokens(groups, judge.measure)
        self.comparisons = [Comparison.of_runs(judge, self.sides, groups) for judge in self.judges]
        return self.comparisons[0]

    def warn_of_time(self, groups: Sequence[Runs]) -> None:
        """Also warn if a side needs much more time for the same tokens."""
        names = [side.name for side in self.sides]
        self.warnings += fairness.warnings_of_time(names, groups)

    def progress(self) -> str:
        """Return the verdicts of the first measure on the variants that have the newest pair."""
        verdicts = self.comparisons[0].verdicts().values()
        pairs = max(verdict.interval.pairs for verdict in verdicts)
        return "\n".join(verdict.text for verdict in verdicts if verdict.interval.pairs == pairs)

    def as_values(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON and the page."""
        comparisons = [comparison.as_values() for comparison in self.comparisons]
        return {"warnings": self.warnings, "comparisons": comparisons}

    def write(self, folder: Path, **more: Any) -> None:
        """Write the result as JSON, and as a page."""
        values = {**self.as_values(), **more}
        replace_text(folder / RESULT, json.dumps(values, indent=1) + "\n")
        replace_text(folder / PAGE, page_of(values))

    def print(self) -> None:
        """Print the table of each measure, the warnings, and the verdicts."""
        for comparison in self.comparisons:
            print(f"\n{comparison.judge.measure.name}\n{comparison.table()}")
        print()
        for warning in self.warnings:
            print(f"unfair? {warning}")
        for comparison in self.comparisons:
            print(*(verdict.text for verdict in comparison.verdicts().values()), sep="\n")


def page_of(values: dict[str, Any]) -> str:
    """Return the page of a comparison's values, as `compare.json` has them."""
    first = values["comparisons"][0]
    title = f"{first['base']} and {', '.join(one['name'] for one in first['variants'])}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="unfair">Unfair? {escape(line)}</p>' for line in values["warnings"]),
    ]
    for comparison in values["comparisons"]:
        for variant in comparison["variants"]:
            parts += _section(comparison, variant)
    if "command" in values:
        parts.append(f"<p>The same command continues: <code>{escape(values['command'])}</code></p>")
    return "\n".join([*parts, "</html>\n"])


def _section(comparison: dict[str, Any], variant: dict[str, Any]) -> Iterator[str]:
    """Yield a variant's verdict, its chart, and a table of its pairs."""
    yield f"<h2>{escape(variant['verdict'])}</h2>"
    yield (
        f"<p>{escape(comparison['measure'])}: each pair's difference, {escape(variant['name'])} "
        f"minus {escape(comparison['base'])} (dots), and the interval after each pair (band).</p>"
    )
    yield from chart(variant, comparison["margin"])
    yield "<details><summary>Each pair</summary><table>"
    heads = ["seed", comparison["base"], variant["name"], "difference", "interval so far"]
    yield f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"
    pairs = zip(
        variant["seeds"], variant["base"], variant["variant"], variant["intervals"], strict=True
    )
    for seed, base, ours, (low, high) in pairs:
        interval = "" if low is None else f"{low:.4f} to {high:.4f}"
        cells = [str(seed), f"{base:.4f}", f"{ours:.4f}", f"{ours - base:+.4f}", interval]
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table></details>"


def chart(variant: dict[str, Any], margin: float | None) -> Iterator[str]:
    """Yield a drawing: differences as dots, the interval as a band, lines at 0 and the margin."""
    pairs = zip(variant["base"], variant["variant"], strict=True)
    differences = [ours - base for base, ours in pairs]
    bands = [
        (place, low, high)
        for place, (low, high) in enumerate(variant["intervals"])
        if low is not None
    ]
    lines = [0.0] if margin is None else [0.0, -margin, margin]
    low, high = _range([*differences, *lines], bands)

    def x(place: int) -> float:
        step = (WIDE - LEFT - EDGE) / max(1, len(differences) - 1)
        return round(LEFT + place * step, 1)

    def y(value: float) -> float:
        share = (high - min(max(value, low), high)) / (high - low)
        return round(EDGE + share * (HIGH - 2 * EDGE), 1)

    yield f'<svg viewBox="0 0 {WIDE:.0f} {HIGH:.0f}" role="img">'
    yield f"<title>{escape(variant['verdict'])}</title>"
    if bands:
        outline = [(place, top) for place, _, top in bands]
        outline += [(place, bottom) for place, bottom, _ in reversed(bands)]
        points = " ".join(f"{x(place)},{y(value)}" for place, value in outline)
        yield f'<polygon points="{points}" fill="#36c" fill-opacity=".2" stroke="#36c"/>'
    for value in lines:
        dashes = "" if value == 0 else ' stroke-dasharray="5 4"'
        yield f'<path d="M{LEFT} {y(value)}H{WIDE - EDGE}" stroke="#888"{dashes}/>'
    for value in {low, 0.0, high}:
        yield f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>'
    for place, difference in enumerate(differences):
        yield f'<circle cx="{x(place)}" cy="{y(difference)}" r="4" fill="#c30"/>'
        yield f'<text x="{x(place)}" y="{HIGH - 4}" text-anchor="middle">{place + 1}</text>'
    yield "</svg>"


def _range(
    values: Sequence[float], bands: Sequence[tuple[int, float, float]]
) -> tuple[float, float]:
    """Return the ends of the axis: all values, and the last interval; early ones may be cut."""
    last = bands[-1][1:] if bands else ()
    low = min(*values, *last)
    high = max(*values, *last)
    room = 0.1 * (high - low) or 1.0
    return low - room, high + room
