"""Reads a run directory during the run or long after it; nothing here imports torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_gpt import PROGRAM
from lockstep_gpt.catalog import extra_of_command
from lockstep_gpt.damaged_files import (
    read_informative_object,
    read_informative_text,
)
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.metrics_rows import STEP, read_metrics

POINTS = 600  # per curve; few screens have more columns
TOKENS = "trainer/tokens"
RECEIPT_LINE = re.compile(r"  (\w+) +(\S.*)")
AT_STEP = re.compile(r"step +(\d+)/")
SAMPLE_LINE = re.compile(r"  \| ?(.*)")
Row = list[float]  # step, tokens, value


def read_run(path: Path) -> dict[str, Any]:
    """Return everything that a report shows of the run in `path`, as plain values.

    Raises:
        UserError: `path` isn't a run directory.
    """
    run = RunDirectory(path)
    values = run.values()
    log = read_informative_text(run.log)
    receipts = list(_receipts(log.splitlines()))
    curves = read_curves(run.metrics)
    return {
        "name": path.resolve().name,
        "status": _status(run, curves),
        "summary": run.read_summary(),
        "starts": len(receipts),
        "receipt": receipts[-1] if receipts else {},
        "changes": read_informative_text(run.overrides).splitlines(),
        "curves": curves,
        "advice": _last(r"^gradient noise scale: .*$", log),
        "samples": list(_samples(log.splitlines())),
        "environment": read_informative_object(path / "environment.json"),
        "commands": _commands(path, values),
    }


def _status(run: RunDirectory, curves: dict[str, list[Row]]) -> str:
    """Return the run's status; a summary from before the last row is of an earlier part."""
    failure = run.read_failure()
    if failure:
        return f"failed on rank {failure.get('rank')}: {failure.get('error')}"
    summary = run.read_summary()
    last = max((rows[-1][0] for rows in curves.values()), default=0)
    if summary and summary.get("step", 0) >= last:
        return str(summary["status"])
    return "still running, or killed: it has not recorded how it ended"


def _commands(path: Path, values: dict[str, Any]) -> dict[str, str]:
    """Return the commands that repeat the run bit for bit, resume it, and train it longer."""
    run = shlex.quote(str(path))
    again = shlex.quote(f"{path}-again")
    go_on = f"{PROGRAM} train run_dir={run} resume=auto"
    commands = {
        "repeat": f"mkdir {again} && cp {run}/config.yaml {again} && "
        f"{PROGRAM} train run_dir={again} resume=auto",
        "resume": go_on,
    }
    if values.get("max_steps"):
        commands["train longer"] = f"{go_on} max_steps={2 * values['max_steps']}"
    if extra_of_command("compare") is None:  # its extra is here
        commands["is a change better? (docs/evidence.md)"] = f"{PROGRAM} compare --help"
    return commands


def read_curves(path: Path) -> dict[str, list[Row]]:
    """Return numeric column -> at most `POINTS` rows of (step, tokens, value)."""
    table = read_metrics(path)
    table.warn_if_damaged(path)
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=False))
    steps = columns.pop(STEP, ())
    tokens = columns.pop(TOKENS, steps)
    curves = {}
    for name, texts in columns.items():
        filled = [row for row, text in enumerate(texts) if text]
        try:
            values = np.array([float(texts[row]) for row in filled])
        except ValueError:  # text that a callback logged
            continue
        points = []
        for place in thinned(values):
            row = filled[place]
            points.append([float(steps[row]), float(tokens[row] or "nan"), float(values[place])])
        if points:
            curves[name] = points
    return curves


def thinned(values: npt.NDArray[np.float64], points: int = POINTS) -> list[int]:
    """Return at most `points` indices of `values`, in order, so that no peak is lost.

    Each stretch keeps its smallest and largest value, or a NaN if it has one. The first and the
    last value are always kept.
    """
    last = len(values) - 1
    if last < points:
        return list(range(last + 1))
    ends = np.linspace(1, last, points // 2, dtype=int)  # one stretch fewer: room for both ends
    indices = {0, last}
    for start, end in pairwise(ends.tolist()):
        stretch = values[start:end]
        indices |= {start + int(stretch.argmin()), start + int(stretch.argmax())}
    return sorted(indices)


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


def _samples(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples that the model generated: step and text."""
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
            yield {"step": step, "text": "\n".join(text)}
            text = None
        if line.startswith("sample"):
            text = []


def _last(pattern: str, log: str) -> str:
    matches = re.findall(pattern, log, flags=re.MULTILINE)
    return str(matches[-1]) if matches else ""
