"""The law as an SVG picture, drawn without a library."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep_gpt.extras.cluster.law import Law

WIDE, HIGH, MARGIN = 640, 400, 56  # pixels
TICKS = [digit * 10.0**power for power in range(4, 12) for digit in (1, 2, 5)]
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class _Axes:
    """Maps weights, on a log scale, and losses to pixels."""

    counts: tuple[float, float]
    losses: tuple[float, float]

    def x(self, count: float) -> float:
        low, high = map(math.log, self.counts)
        return round(MARGIN + (math.log(count) - low) / (high - low) * (WIDE - 1.5 * MARGIN), 1)

    def y(self, loss: float) -> float:
        low, high = self.losses
        return round(MARGIN / 2 + (high - loss) / (high - low) * (HIGH - 1.5 * MARGIN), 1)


def as_svg(law: Law, runs: list[dict[str, Any]], checked: list[dict[str, Any]]) -> str:
    """Return dots for the runs of the fit, rings for those it predicted, lines for the law."""
    points = [*runs, *checked]
    counts, losses = ([point[name] for point in points] for name in ("weights", "val_loss"))
    axes = _Axes((min(counts) / 1.3, max(counts) * 1.5), (min(losses) - 0.05, max(losses) + 0.05))
    last = max(run["weights"] for run in runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDE}" height="{HIGH}" fill="#fff"/>',
        *_ticks(axes),
        _line(axes, law, (axes.counts[0], last), ""),
        _line(axes, law, (last, axes.counts[1]), "5 4"),  # beyond the fitted runs
        *(_point(axes, run, "#c30") for run in runs),
        *(_point(axes, run, "#fff") for run in checked),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _line(axes: _Axes, law: Law, ends: tuple[float, float], dashes: str) -> str:
    first, last = ends
    counts = [first * (last / first) ** (step / 40) for step in range(41)]
    path = " ".join(f"{axes.x(count)},{axes.y(law.loss(count))}" for count in counts)
    return f'<polyline points="{path}" fill="none" stroke="#36c" stroke-dasharray="{dashes}"/>'


def _point(axes: _Axes, run: dict[str, Any], fill: str) -> str:
    x = axes.x(run["weights"])
    y = axes.y(run["val_loss"])
    label = f'<text x="{x + 8:.1f}" y="{y - 8:.1f}">{run["size"]}, {run["val_loss"]:.3f}</text>'
    return f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="#c30"/>{label}'


def _ticks(axes: _Axes) -> Iterator[str]:
    """Yield a grid with numbers, and the axes' names."""
    bottom = HIGH - MARGIN
    right = WIDE - MARGIN / 2
    for step in range(math.ceil(axes.losses[0] * 10), math.floor(axes.losses[1] * 10) + 1):
        y = axes.y(step / 10)
        yield f'<path d="M{MARGIN} {y}H{right}" stroke="#ddd"/>'
        yield f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{step / 10:.1f}</text>'
    for count in TICKS:
        if axes.counts[0] <= count <= axes.counts[1]:
            x = axes.x(count)
            length, unit = next((length, unit) for length, unit in UNITS if count >= length)
            yield f'<path d="M{x} {MARGIN / 2}V{bottom}" stroke="#ddd"/>'
            label = f"{count / length:g}{unit}"
            yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
    names = (("weights of the blocks", WIDE / 2, HIGH - 14, 0), ("loss, nats", 14, HIGH / 2, -90))
    for name, x, y, turn in names:
        turned = f"rotate({turn} {x} {y})"
        yield f'<text x="{x}" y="{y}" text-anchor="middle" transform="{turned}">{name}</text>'
