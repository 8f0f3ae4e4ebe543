"""The page of a comparison: one file of HTML, whose charts are drawings, without any script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

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
