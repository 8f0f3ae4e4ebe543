"""Reads the rows of `metrics.csv`, also of a damaged one; nothing here imports torch."""

import csv
import logging
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.damaged_files import readable
from lockstep.settings import counted

logger = logging.getLogger(__name__)

STEP = "trainer/step"
# Columns of numbers -> the last value's name in summary.json; None: not in the summary.
COLUMNS = {
    STEP: None,
    "trainer/tokens": None,
    "train/loss": "train_loss",
    "val/loss": "val_loss",
    "val/perplexity": "val_perplexity",
    "optim/lr": "lr",
    "optim/grad_norm": None,
    "optim/skipped": None,
    "throughput/tokens_per_second": None,
    "throughput/step_seconds": None,
    "throughput/step_seconds_p50": "step_seconds_p50",
    "throughput/step_seconds_p95": "step_seconds_p95",
    "throughput/mfu": "mfu",
    "data/wait_share": "data_wait_share",
    "system/peak_memory_gb": "peak_memory_gb",
}
# Those that only a run on tokens has from its start.
OF_TOKENS = (
    *("trainer/tokens", "train/loss", "val/loss", "val/perplexity"),
    *("throughput/tokens_per_second", "throughput/mfu"),
)
UNREADABLE = ("\0", "\ufffd")  # in text of another encoding, or without any


@dataclass
class MetricsRows:
    """The sound rows of a file.

    Attributes:
        columns: the names in the header.
        rows: for each step, a value for each column as text; empty without a value.
        damaged: how many lines are no such rows.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    damaged: int = 0

    def as_dicts(self) -> list[dict[str, str]]:
        """Return each row as a dictionary, by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def warn_if_damaged(self, path: Path, remark: str = "") -> None:
        """Log how many lines of the file at `path` are damaged."""
        if self.damaged:
            lines = counted(self.damaged, "damaged line")
            logger.warning("%s: left out %s%s", path, lines, remark)


def read_metrics(path: Path, end: int | None = None) -> MetricsRows:
    """Return the rows that begin before byte `end`; none if there is no file.

    A last line without its end is not a row yet: it is being written, or a crash cut it off. Each
    other line that isn't a row with a step of its own and numbers in `COLUMNS` is damaged.

    Raises:
        UserError: the file is unreadable, or a folder.
    """
    with readable(path):
        if not path.exists():
            return MetricsRows()
        content = path.read_bytes()[:end]
    lines = content.decode("utf-8-sig", errors="replace").split("\n")[:-1]
    if not lines:
        return MetricsRows(damaged=int(bool(content)))
    columns = _fields_of(lines[0]) or []
    if STEP not in columns:
        return MetricsRows(damaged=len(lines))
    table = MetricsRows(columns)
    step = columns.index(STEP)
    numbers = [place for place, name in enumerate(columns) if name in COLUMNS]
    seen = set()
    for line in lines[1:]:
        row = _fields_of(line)
        if row is None or not _is_sound(row, columns, numbers) or row[step] in seen:
            table.damaged += 1
            continue
        seen.add(row[step])
        table.rows.append(row)
    return table


def _fields_of(line: str) -> list[str] | None:
    """Return a line's values; None if it isn't text. A stray quote can't reach the next line."""
    if any(mark in line for mark in UNREADABLE):
        return None
    try:
        return next(csv.reader([line.removesuffix("\r")]), [])
    except csv.Error:
        return None


def _is_sound(row: list[str], columns: list[str], numbers: list[int]) -> bool:
    if len(row) != len(columns):
        return False
    step = row[columns.index(STEP)]
    if not (step.isascii() and step.isdecimal()):
        return False
    try:
        for place in numbers:
            float(row[place] or "0")
    except ValueError:
        return False
    return True
