"""Reads a run directory during the run or long after it; nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.damaged_files import read_informative_object, read_informative_text
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.run.directory import RunDirectory

TOKENS = "trainer/tokens"
RECEIPT_LINE = re.compile(r"  (\w+) +(\S.*)")
AT_STEP = re.compile(r"step +(\d+)/")
SAMPLE_LINE = re.compile(r"  \| ?(.*)")
Point = tuple[float, float, float]  # step, tokens, value


@dataclass(frozen=True)
class Run:
    """What a report shows of a run."""

    name: str
    status: str
    summary: dict[str, Any]
    receipts: list[dict[str, str]]  # of each start
    changes: list[str]  # of settings, on resume
    curves: dict[str, list[Point]]  # by column of metrics.csv
    samples: list[tuple[int, str]]  # step and text
    environment: dict[str, Any]


def read_run(path: Path) -> Run:
    """Return the run in the directory `path`; damaged files are left out, with a warning.

    Raises:
        UserError: `path` isn't a run directory.
    """
    run = RunDirectory(path)
    run.values()
    lines = read_informative_text(run.log).splitlines()
    curves = read_curves(run.metrics)
    summary = run.read_summary()
    return Run(
        name=path.resolve().name,
        status=_status(run.read_failure(), summary, curves),
        summary=summary,
        receipts=list(_receipts(lines)),
        changes=read_informative_text(run.overrides).splitlines(),
        curves=curves,
        samples=list(_samples(lines)),
        environment=read_informative_object(path / "environment.json"),
    )


def _status(failure: dict[str, Any], summary: dict[str, Any], curves: dict[str, Any]) -> str:
    """Return the run's status; a summary from before the last row is of an earlier part."""
    if failure:
        return f"failed on rank {failure.get('rank')}: {failure.get('error')}"
    last = max((points[-1][0] for points in curves.values()), default=0)
    if summary and summary.get("step", 0) >= last:
        return str(summary["status"])
    return "still running, or killed: it has not recorded how it ended"


def read_curves(path: Path) -> dict[str, list[Point]]:
    """Return the points of each numeric column."""
    table = read_metrics(path)
    table.warn_if_damaged(path)
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=False))
    steps = columns.pop(STEP, ())
    tokens = columns.pop(TOKENS, steps)
    curves = {}
    for name, texts in columns.items():
        rows = zip(steps, tokens, texts, strict=True)
        try:
            points = [
                (float(at), float(read or "nan"), float(text)) for at, read, text in rows if text
            ]
        except ValueError:  # text that a callback logged
            continue
        if points:
            curves[name] = points
    return curves


def _receipts(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the receipt of each start of the run, in order."""
    receipt: dict[str, str] = {}
    for line in [*lines, ""]:
        field = RECEIPT_LINE.fullmatch(line)
        if field and (receipt or field[1] == "run"):
            receipt[field[1]] = field[2]
        elif receipt:
            yield receipt
            receipt = {}


def _samples(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the step and the text of each sample that the model generated."""
    step = 0
    text: list[str] | None = None
    for line in [*lines, ""]:
        progress = AT_STEP.match(line)
        if progress:
            step = int(progress[1])
        sample_line = SAMPLE_LINE.fullmatch(line)
        if text is not None and sample_line:
            text.append(sample_line[1])
        elif text:
            yield step, "\n".join(text)
            text = None
        if line.startswith("sample"):
            text = []
