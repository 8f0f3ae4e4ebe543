"""The runs that are compared: their sides, their seeds, and the number that is measured of each.

A measure has a unit, and a direction that is better.
"""

from __future__ import annotations

import glob
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.run.directory import RunDirectory

FINISHED = ("done", "stopped early")  # the latter by a callback
Runs = Mapping[int, RunDirectory]  # by seed

SECONDS_TO = "seconds_to="  # followed by a validation loss
LOWER_IS_BETTER = ("loss", "perplexity", "seconds", "memory")  # parts of a column's name
MEASURES = "val_loss, tokens_per_second, seconds_to=LOSS, or a column of metrics.csv"


@dataclass(frozen=True)
class Side:
    """One setting of a comparison.

    Attributes:
        name: as a sentence contains it, such as `muon lr=0.01`.
        folder: the name of the folder of its runs.
        words: its overrides; none for groups of finished runs.
    """

    name: str
    folder: str
    words: tuple[str, ...] = ()


def sides_of(texts: Sequence[str]) -> list[Side]:
    """Return the sides that texts of overrides describe; the first is the base.

    A name has a choice's value, and a setting's last part: `optim=muon optim.lr=0.01` is called
    `muon lr=0.01`. If two sides would have the same name, they are called as typed.
    """
    words = [_words_of(text) for text in texts]
    names = [" ".join(map(_short, side)) or "base" for side in words]
    if len({*map(_folder_of, names)}) < len(names):
        names = [" ".join(side) or "base" for side in words]
    return [Side(name, _folder_of(name), side) for name, side in zip(names, words, strict=True)]


def _words_of(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:  # an open quotation mark
        raise UserError(f"--variant {text}: {error}; quote words as in a shell") from None


def _short(word: str) -> str:
    name, equals, value = word.partition("=")
    if "." not in name and equals:
        return value
    return f"{name.rpartition('.')[2]}{equals}{value}"


def _folder_of(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def finished_groups(patterns: Sequence[str]) -> tuple[list[Side], list[dict[int, RunDirectory]]]:
    """Return a side for each pattern of finished runs, and its runs by seed.

    Raises:
        UserError: a pattern matches no run, a run isn't done, or two of a group have one seed.
    """
    groups = [_finished(pattern) for pattern in patterns]
    names = [_last_plain_part(pattern) for pattern in patterns]
    if len({*names}) < len(names):
        names = list(patterns)
    return [Side(name, _folder_of(name)) for name in names], groups


def _last_plain_part(pattern: str) -> str:
    """Return the last folder of a pattern that has no wildcard."""
    plain = [part for part in Path(pattern).parts if not glob.has_magic(part)]
    return plain[-1] if plain else pattern


def _finished(pattern: str) -> dict[int, RunDirectory]:
    runs: dict[int, RunDirectory] = {}
    for path in sorted(glob.glob(pattern)):  # noqa: PTH207 (the pattern may be absolute)
        run = RunDirectory(Path(path))
        if not run.config.is_file():
            continue
        if not is_finished(run):
            raise UserError(f"{path} has not finished; continue it by resume=auto, or leave it out")
        seed = int(run.values()["seed"])
        if seed in runs:
            raise UserError(f"{runs[seed].path} and {path} have seed={seed}; name one of them")
        runs[seed] = run
    if not runs:
        raise UserError(f"--runs {pattern} matches no run; name folders that have a config.yaml")
    return runs


def is_finished(run: RunDirectory) -> bool:
    """Return whether a run has ended as it should."""
    return run.read_summary().get("status") in FINISHED


def common_seeds(sides: Sequence[Side], groups: Sequence[Runs]) -> list[int]:
    """Return the seeds that all groups have, in order, or raise a `UserError` if there are none."""
    seeds = sorted(set.intersection(*({*runs} for runs in groups)))
    if not seeds:
        each = "; ".join(
            f"{side.name} has {', '.join(map(str, sorted(runs)))}"
            for side, runs in zip(sides, groups, strict=True)
        )
        raise UserError(f"no seed is in all groups: {each}; train both sides with the same seeds")
    return seeds


@dataclass(frozen=True)
class Measure:
    """A number of a run.

    Attributes:
        name: as typed.
        unit: written after a difference, with a space before; may be empty.
        lower_is_better: whether a run with a smaller number is better.
        read: returns the number of a finished run; NaN if the run has none.
    """

    name: str
    unit: str
    lower_is_better: bool
    read: Callable[[RunDirectory], float]

    @property
    def is_of_text(self) -> bool:
        """Whether the number means nothing without the validation text."""
        return "loss" in self.name or "perplexity" in self.name or self.name.startswith(SECONDS_TO)

    @property
    def is_of_speed(self) -> bool:
        """Whether runs at the same time would change each other's number."""
        return "second" in self.name

    def of(self, run: RunDirectory) -> float:
        """Return the number of a finished run, or raise a `UserError` if the run has none."""
        value = self.read(run)
        if math.isfinite(value):
            return value
        if self.name.startswith(SECONDS_TO):
            raise UserError(f"{run.path} never reached this loss: --measure {self.name}; raise it")
        raise UserError(f"{run.path} has no {self.name}; measure {MEASURES}")


def measure_of(name: str, has_tokens: bool = True) -> Measure:
    """Return the measure that a name means, or raise a `UserError`.

    Args:
        name: as typed.
        has_tokens: whether runs train with tokens, so that a loss is a cross-entropy in nats.
    """
    if name == "val_loss":
        unit = " nats" if has_tokens else ""
        return Measure(name, unit, lower_is_better=True, read=_validation_loss)
    if name == "tokens_per_second":
        return Measure(name, " tokens/s", lower_is_better=False, read=_of_summary(name))
    if name.startswith(SECONDS_TO):
        return Measure(name, " s", lower_is_better=True, read=_seconds_to(_target_of(name)))
    is_lower = any(part in name for part in LOWER_IS_BETTER)
    return Measure(name, "", is_lower, read=_last_of_column(name))


def _target_of(name: str) -> float:
    text = name.removeprefix(SECONDS_TO)
    try:
        target = float(text)
    except ValueError:
        raise UserError(f"--measure {name}: {text!r} is not a loss; write seconds_to=1.5") from None
    return target


def _validation_loss(run: RunDirectory) -> float:
    """Return the last one, also if a module has logged it by itself."""
    value = _of_summary("val_loss")(run)
    return value if math.isfinite(value) else _last_of_column("val/loss")(run)


def _of_summary(name: str) -> Callable[[RunDirectory], float]:
    def read(run: RunDirectory) -> float:
        value = run.read_summary().get(name)
        return math.nan if value is None else float(value)

    return read


def _last_of_column(name: str) -> Callable[[RunDirectory], float]:
    def read(run: RunDirectory) -> float:
        texts = [row[name] for row in read_metrics(run.metrics).as_dicts() if row.get(name)]
        return float(texts[-1]) if texts else math.nan

    return read


def _seconds_to(target: float) -> Callable[[RunDirectory], float]:
    """Return what reads the seconds of training, without validations, up to a validation loss."""

    def read(run: RunDirectory) -> float:
        seconds = 0.0
        step = 0
        for row in read_metrics(run.metrics).as_dicts():
            steps = int(row[STEP]) - step
            step += steps
            seconds += steps * float(row.get("throughput/step_seconds") or 0)
            if float(row.get("val/loss") or math.inf) <= target:
                return seconds
        return math.nan

    return read
