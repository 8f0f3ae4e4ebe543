"""`trace.csv`: the bits of each step, as hexadecimal digits; nothing here imports torch.

A row has the optimizer step, the bits of the norm of its gradient, and 8 digits for each of its
micro-batches, counted over all ranks: sums of the bits of its tokens, its loss, and its gradients.
Then there are 24 digits for each tensor: its gradients in all micro-batches, and before the step
its weights and their state in the optimizer. So where one bit was flipped, few sums differ.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lockstep.damaged_files import readable
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.whole_files import replace_text

DIGITS = 8  # of a number
FIXED = ("step", "norm", "tokens", "losses", "gradients")


class TraceRow(NamedTuple):
    """One step; each number is as 8 digits."""

    step: int
    norm: str
    tokens: list[str]  # of each micro-batch, as the next two
    losses: list[str]
    gradients: list[str]
    tensors: list[str]  # gradients of each tensor
    weights: list[str]  # of each tensor, before the step
    states: list[str]  # of the optimizer, for each tensor, before the step


class TraceFile:
    """The file of one run.

    Args:
        run: where it is.
        names: of the tensors that are trained.
    """

    def __init__(self, run: RunDirectory, names: Iterable[str]) -> None:
        self.run = run
        self.columns = [*FIXED, *names]

    def truncate_after(self, step: int) -> None:
        """Keep the rows up to optimizer step `step`; creates the file."""
        columns, rows = read_trace(self.run.trace)
        if columns != self.columns:  # the run was without a trace
            rows = []
        lines = [",".join(self.columns), *(_line(row) for row in rows if row.step <= step)]
        with self.run.writing():
            replace_text(self.run.trace, "".join(f"{line}\n" for line in lines))

    def append(self, rows: Iterable[TraceRow]) -> None:
        """Add rows."""
        with self.run.writing(), self.run.trace.open("a", encoding="ascii") as file:
            file.writelines(f"{_line(row)}\n" for row in rows)


def _line(row: TraceRow) -> str:
    parts = ["".join(row.tokens), "".join(row.losses), "".join(row.gradients)]
    of_tensors = zip(row.tensors, row.weights, row.states, strict=True)
    return ",".join([str(row.step), row.norm, *parts, *map("".join, of_tensors)])


def as_digits(number: int) -> str:
    """Return a sum of bits as 8 digits; a power of two, such as a flipped bit, changes them."""
    return f"{number % (2**32 - 1):08x}"


def read_trace(path: Path) -> tuple[list[str], list[TraceRow]]:
    """Return the columns and the rows of a trace; both are empty if there is none.

    Raises:
        UserError: the file is damaged.
    """
    with readable(path):
        if not path.exists():
            return [], []
        text = path.read_text(encoding="ascii", errors="replace")
    lines = [*csv.reader(text.split("\n")[:-1])]  # a last line without its end is not a row yet
    if not lines:
        return [], []
    columns = lines[0]
    try:
        return columns, [_row(line, len(columns)) for line in lines[1:]]
    except ValueError:
        raise UserError(f"{path} is damaged; move it away, and steps are not compared") from None


def _row(values: list[str], count: int) -> TraceRow:
    step, norm, *parts = values
    widths = {len(part) for part in parts[3:]}
    if len(values) != count or not widths <= {3 * DIGITS}:
        raise ValueError
    tokens, losses, gradients = map(_numbers, parts[:3])
    of_tensors = [_numbers(part) for part in parts[3:]]
    tensors, weights, states = ([numbers[place] for numbers in of_tensors] for place in range(3))
    return TraceRow(int(step), norm, tokens, losses, gradients, tensors, weights, states)


def _numbers(digits: str) -> list[str]:
    return [digits[start : start + DIGITS] for start in range(0, len(digits), DIGITS)]
