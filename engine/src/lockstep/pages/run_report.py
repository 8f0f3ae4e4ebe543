"""The command `report RUN ...`: one HTML file of a run, or of several side by side."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lockstep import project
from lockstep.optional import import_optional
from lockstep.pages.runs import Run, read_run
from lockstep.whole_files import write_output

# The first panels: their columns of metrics.csv. Each other column has a panel of its own.
PANELS = (
    ("train/loss", "val/loss"),
    ("optim/lr",),
    ("optim/grad_norm",),
    ("throughput/tokens_per_second",),
)
WIDTH, HEIGHT = 5.5, 2.6  # of a panel, in inches
MARKED = (
    30  # points of the longest curve whose points are marked: without, a single one is invisible
)
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "report", "lines.linewidth": 1.2}
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ max-width: 70rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif; }}
body > div {{ overflow-x: auto; }}
svg {{ width: 100%; height: auto; }}
th, td {{ padding: 0.2rem 1rem 0.2rem 0; text-align: left; vertical-align: top; }}
tbody th {{ font-weight: normal; color: #555; white-space: nowrap; }}
.differs td {{ background: #fff3d6; }}
pre {{ padding: 0.6rem; background: #f4f4f4; white-space: pre-wrap; overflow-wrap: anywhere; }}
</style>
"""


def main(arguments: list[str]) -> int:
    """Write the file and print its path."""
    options = _parser().parse_args(arguments)
    first: Path = options.run[0]
    folder = first if len(options.run) == 1 else first.parent
    output = options.output or folder / "report.html"
    write_output(output, report([read_run(path) for path in options.run], options.over))
    print(f"{output}: open it in any browser; it needs no network")
    return 0


def report(runs: Sequence[Run], over: str = "steps") -> str:
    """Return the HTML of one or more runs, with curves over `steps` or `tokens`.

    Raises:
        UserError: matplotlib is missing.
    """
    title = escape(", ".join(run.name for run in runs))
    sections = {
        "Outcome": _table(runs, outcome),
        "Curves": curves(runs, over),
        "What the model wrote": "".join(map(_sample, runs)),
        "Receipt": _table(runs, lambda run: run.receipts[-1] if run.receipts else {}),
        "Environment": _table(runs, lambda run: run.environment),
    }
    blocks = [f"<h2>{name}</h2>\n<div>{html}</div>\n" for name, html in sections.items() if html]
    return "".join([HEAD.format(title=title), f"<h1>{title}</h1>\n", *blocks])


def outcome(run: Run) -> dict[str, Any]:
    """Return how the run ended, or where it is."""
    ends = [points[-1] for points in run.curves.values()]
    step, tokens, _ = max(ends, default=(0, 0, 0))
    values = {
        "status": run.status,
        "steps": f"{step:,.0f}",
        "tokens": f"{tokens:,.0f}",
        "starts": str(len(run.receipts)),
        "changed on resume": "; ".join(run.changes),
    }
    losses = [point for point in run.curves.get("val/loss", ()) if math.isfinite(point[2])]
    if losses:
        step, _, loss = min(losses, key=lambda point: point[2])
        values["lowest validation loss"] = f"{loss:.4f} at step {step:,.0f}"
    for name, unit in (("tokens_per_second", "tokens per second"), ("wall_seconds", "seconds")):
        if name in run.summary:
            values[f"{unit}, last start"] = f"{run.summary[name]:,.1f}"
    return {name: value for name, value in values.items() if value}


def curves(runs: Sequence[Run], over: str) -> str:
    """Return every column of metrics.csv as a curve, in one SVG; empty without any."""
    needed_by = project.typed("report")
    matplotlib = import_optional(needed_by, "matplotlib", "report")
    names = sorted({name for run in runs for name in run.curves})
    known = {name for panel in PANELS for name in panel}
    panels = [panel for panel in PANELS if {*panel} & {*names}]
    panels += [(name,) for name in names if name not in known]
    if not panels:
        return ""
    rows = math.ceil(len(panels) / 2)
    picture = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figures = import_optional(needed_by, "matplotlib.figure", "report")
        figure = figures.Figure(figsize=(2 * WIDTH, rows * HEIGHT), layout="constrained")
        all_axes = figure.subplots(rows, 2, squeeze=False).flat
        for axes, panel in zip(all_axes, panels, strict=False):
            _draw(axes, panel, runs, over)
        for axes in all_axes[len(panels) :]:
            axes.remove()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    text = picture.getvalue()
    return text[text.index("<svg") :]  # HTML has no XML declaration inside


def _draw(axes: Any, panel: Sequence[str], runs: Sequence[Run], over: str) -> None:
    place = 1 if over == "tokens" else 0
    for number, run in enumerate(runs):
        for name in panel:
            points = run.curves.get(name, [])
            axes.plot(
                [point[place] for point in points],
                [point[2] for point in points],
                color=f"C{number}",
                alpha=1.0 if name == panel[-1] else 0.4,
                label=run.name if name == panel[-1] else None,
                marker="." if len(points) <= MARKED else None,
            )
    axes.set_title(" (pale), ".join(panel), loc="left", fontsize=10)
    axes.set_xlabel(over)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize=8)


def _table(runs: Sequence[Run], column: Callable[[Run], Mapping[str, Any]]) -> str:
    """Return a table with a column for each run; rows that differ are highlighted."""
    columns = [column(run) for run in runs]
    keys = dict.fromkeys(key for values in columns for key in values)
    rows = []
    for key in keys:
        cells = [str(values.get(key, "")) for values in columns]
        kind = ' class="differs"' if len({*cells}) > 1 else ""
        tds = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{kind}><th>{escape(key)}</th>{tds}</tr>\n")
    names = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    head = f"<thead><tr><th></th>{names}</tr></thead>" if len(runs) > 1 else ""
    return f"<table>{head}<tbody>\n{''.join(rows)}</tbody></table>" if rows else ""


def _sample(run: Run) -> str:
    if not run.samples:
        return ""
    step, text = run.samples[-1]
    return f"<p>{escape(run.name)}, step {step:,}:</p>\n<pre>{escape(text)}</pre>\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=project.typed("report"),
        description="Make an HTML report of one or several runs, finished or running.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="a run directory")
    parser.add_argument("--over", choices=("steps", "tokens"), default="steps")
    parser.add_argument(
        "--output",
        type=Path,
        help="the file (default: report.html in the run; for several, next to the first)",
    )
    return parser
