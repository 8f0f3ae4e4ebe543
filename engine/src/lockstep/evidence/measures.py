"""What is compared: a number of each finished run, its unit, and which direction is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.errors import UserError
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.run.directory import RunDirectory

SECONDS_TO = "seconds_to="  # followed by a validation loss
LOWER_IS_BETTER = ("loss", "perplexity", "seconds", "memory")  # parts of a column's name
KNOWN = "val_loss, tokens_per_second, seconds_to=LOSS, or a column of metrics.csv"


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
        raise UserError(f"{run.path} has no {self.name}; measure {KNOWN}")


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
