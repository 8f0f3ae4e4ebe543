"""What a run leaves that must not depend on its number of ranks, and how two runs differ."""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.settings import counted

if TYPE_CHECKING:
    import torch

TIMED = ("throughput/", "system/", "data/wait_share")  # columns of metrics.csv that may differ
WEIGHTS = "state_dict."
SCHEDULERS = "lr_schedulers."
STATES = ("optimizer_states.", SCHEDULERS)
STEP = "trainer/step"
Row = dict[str, str]


class Results(NamedTuple):
    """What was logged, without times, and the last weights and states."""

    rows: list[Row]
    state: dict[str, Any]  # path in the checkpoint -> tensor or plain value
    log: str = "metrics.csv"  # what the rows are of

    def digest(self) -> str:
        """Return the SHA-256 of all weights, by name."""
        sha256 = hashlib.sha256()
        for name, value in sorted(self.state.items()):
            if name.startswith(WEIGHTS):
                sha256.update(name.encode())
                sha256.update(bits_of(value) if is_tensor(value) else repr(value).encode())
        return sha256.hexdigest()


class Cell(NamedTuple):
    """A logged value in which two runs differ."""

    step: int
    column: str
    values: tuple[str, str]  # of the first run, of the other


class Differences(NamedTuple):
    """How a run differs from the first one; empty lists if it doesn't."""

    rows: int  # how many differ
    cells: list[Cell]  # of the first row that differs
    weights: list[str]
    states: list[str]  # of optimizers and schedulers
    sizes: tuple[int, int, int]  # of the first run: rows, weights, states
    log: str  # what the rows are of
    columns: list[str]  # that differ in any row

    def __bool__(self) -> bool:
        return bool(self.rows or self.weights or self.states)

    def text(self) -> str:
        """Say how many of what differ."""
        found = (self.rows, len(self.weights), len(self.states))
        kinds = (f"rows of {self.log}", "weights", "states of optimizers")
        parts = zip(found, self.sizes, kinds, strict=True)
        return ", ".join(f"{some} of {all_} {kind}" for some, all_, kind in parts if some)


def results_of(run: RunDirectory) -> Results:
    """Return the results of a run, from its metrics.csv and its last checkpoint."""
    from lockstep.checkpoints.reading import checkpoints_in, read_checkpoint

    present = checkpoints_in(run.checkpoints)
    if not present:
        raise UserError(f"{run.path.name}: the run saved no checkpoint to compare; let it save one")
    content = read_checkpoint(present[-1])
    parts = [name.partition(".")[0] for name in (WEIGHTS, *STATES)]
    state = flat({name: content[name] for name in parts if name in content})
    return Results(rows_of(run), dict(state))


def rows_of(run: RunDirectory) -> list[Row]:
    """Return the rows of a run's metrics.csv without times; none if there is no such file."""
    if not run.metrics.is_file():
        return []
    with run.metrics.open(encoding="utf-8", newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.startswith(TIMED)}
            for row in csv.DictReader(file)
        ]


def flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in nested containers and its path."""
    if isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, content


def differences(
    first: Results,
    other: Results,
    tolerance: float | None = None,
    log_tolerance: float | None = None,
) -> Differences:
    """Return how another run differs from the first one.

    Args:
        first: the results of a run.
        other: those of another.
        tolerance: how far values may be apart, relative to the largest one of the tensor; None:
            they must have the same bits.
        log_tolerance: the same for rows, relative to the largest value of the column, and for what
            schedulers keep; None: `tolerance`.
    """
    log_tolerance = tolerance if log_tolerance is None else log_tolerance
    rows = _differing_rows(first.rows, other.rows, log_tolerance)
    names = [name for name in {**first.state, **other.state} if name not in first.state]
    missing = object()
    for name, value in first.state.items():
        theirs = other.state.get(name, missing)
        allowed = log_tolerance if name.startswith(SCHEDULERS) else tolerance
        if theirs is missing or not _is_equal(value, theirs, allowed):
            names.append(name)
    weights = [name.removeprefix(WEIGHTS) for name in names if name.startswith(WEIGHTS)]
    states = [name for name in names if not name.startswith(WEIGHTS)]
    count = sum(name.startswith(WEIGHTS) for name in first.state)
    sizes = (len(first.rows), count, len(first.state) - count)
    columns = list(dict.fromkeys(cell.column for cells in rows for cell in cells))
    cells = rows[0] if rows else []
    return Differences(len(rows), cells, weights, states, sizes, first.log, columns)


def _differing_rows(
    ours: list[Row], theirs: list[Row], tolerance: float | None
) -> list[list[Cell]]:
    """Return the differing cells of each row that has any."""
    columns = {name: None for row in (*ours, *theirs) for name in row}
    scales = {name: _largest(row.get(name, "") for row in ours) for name in columns}
    nothing: Row = {}
    found = []
    for pair in itertools.zip_longest(ours, theirs, fillvalue=nothing):
        step = int({**pair[1], **pair[0]}.get(STEP) or 0)
        cells = []
        for name in columns:
            values = (pair[0].get(name, ""), pair[1].get(name, ""))
            if not _is_near(*values, tolerance, scales[name]):
                cells.append(Cell(step, name, values))
        if cells:
            found.append(cells)
    return found


def _largest(texts: Iterator[str]) -> float:
    numbers = [abs(number) for number in map(_number, texts) if number is not None]
    return max((number for number in numbers if math.isfinite(number)), default=0.0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_near(ours: str, theirs: str, tolerance: float | None, scale: float) -> bool:
    if ours == theirs:
        return True
    numbers = (_number(ours), _number(theirs))
    if tolerance is None or numbers[0] is None or numbers[1] is None:
        return False
    return abs(numbers[0] - numbers[1]) <= tolerance * scale  # false if one isn't a number


def is_tensor(value: Any) -> bool:
    """Return whether a value of a checkpoint is a tensor."""
    import torch

    return isinstance(value, torch.Tensor)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bits of a tensor's values."""
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1)
    content: bytes = values.view(torch.uint8).numpy().tobytes()
    return content


def _is_equal(ours: Any, theirs: Any, tolerance: float | None) -> bool:
    if not is_tensor(ours) or not is_tensor(theirs):
        is_number = isinstance(ours, float) and isinstance(theirs, float)
        if is_number and tolerance is not None:
            return math.isclose(ours, theirs, rel_tol=tolerance)  # also infinite ones
        return repr(ours) == repr(theirs)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if tolerance is None or not ours.is_floating_point() or not ours.numel():
        return bits_of(ours) == bits_of(theirs)
    apart = (ours.double() - theirs.double()).abs().max()
    return bool(apart <= tolerance * ours.double().abs().max())  # false if one isn't a number


def first_of(found: Differences, name_of: Callable[[int], str]) -> str:
    """Return the first value that differs, of the log or of the checkpoint.

    Args:
        found: at least one difference.
        name_of: returns the name of the first run (0), or of the other one (1).
    """
    if found.cells:
        cell = next((cell for cell in found.cells if cell.column != STEP), found.cells[0])
        values = [value or "nothing" for value in cell.values]
        return (
            f"step {cell.step}, {cell.column} of {found.log}: {values[0]} ({name_of(0)}), "
            f"{values[1]} ({name_of(1)})"
        )
    where = (found.weights or found.states)[0]
    return f"the last checkpoint, {where}; no row of {counted(found.sizes[0], 'row')} differs"
