"""What validation and saving cost: measured once, reported, and warned of if it is much."""

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import Trainer

from lockstep_gpt.processes import freeze_lasting_objects
from lockstep_gpt.run.callbacks.checkpoints import Checkpoints
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.run.planned_pauses import saves_after, validations_after
from lockstep_gpt.settings import not_a_config

logger = logging.getLogger(__name__)

LIMIT = 0.05  # share of the time for validation, and for saving; both together have twice that
FEW_SECONDS = 60  # to come; less is worth no warning


@dataclass(frozen=True)
class Pauses:
    """The pauses of one kind, validation or saving, in the rest of a run."""

    count: int
    seconds: float | None  # that one takes; None: not measured yet

    @property
    def total(self) -> float:
        """Return the seconds of all together, as far as they are known."""
        return self.count * (self.seconds or 0.0)


@dataclass(frozen=True)
class Forecast:
    """The seconds that the rest of a run will take."""

    training: float
    validation: Pauses
    saving: Pauses

    @property
    def known(self) -> dict[str, Pauses]:
        """Return the pauses that have been measured, by name."""
        kinds = {"validation": self.validation, "saving": self.saving}
        return {name: pauses for name, pauses in kinds.items() if pauses.seconds is not None}

    def share(self, *pauses: Pauses) -> float:
        """Return the share of the time that `pauses` take."""
        whole = self.training + self.validation.total + self.saving.total
        return sum(kind.total for kind in pauses) / whole

    def excess(self, pauses: Pauses) -> int:
        """Return the number by which the count of `pauses` is divided to reach the limit."""
        # If both kinds are within it, training has the rest of the time.
        return math.ceil(pauses.total * (1 - 2 * LIMIT) / (self.training * LIMIT))

    def __str__(self) -> str:
        """Return the shares, and what they consist of."""
        parts = [
            f"{name} {self.share(pauses):.1%} ({pauses.count:,} x {pauses.seconds:.2f} s)"
            for name, pauses in self.known.items()
        ]
        return "share of the remaining time: " + ", ".join(parts)


@not_a_config
@dataclass(eq=False)
class Overhead(StepCallback):
    """Tells, on rank 0, which share of the time validation and saving take.

    After the first step, it also excludes what stays from garbage collection, which would pause.
    """

    checkpoints: Checkpoints  # which measure how long training waits for each
    val_every: int  # optimizer steps between validations
    compiled: bool = False  # whether the first validation compiles the model
    background: bool = False  # whether checkpoints are written while training continues
    grace_seconds: float = 60.0  # for the last save, after a signal
    tokens_per_step: int | None = None  # over all ranks
    val_tokens: int | None = None  # of one validation
    validations: list[float] = field(default_factory=list, init=False)  # seconds of each
    _started_at: float | None = field(default=None, init=False)  # clock before the first step
    _seen_at: float = field(default=0.0, init=False)  # clock after the last step or validation
    _validating_at: float = field(default=0.0, init=False)
    # The clock after the first step, which may compile the model.
    _origin: tuple[int, float] | None = field(default=None, init=False)
    _reported: tuple[bool, bool] = field(default=(False, False), init=False)
    _has_frozen: bool = field(default=False, init=False)
    _warned: set[str] = field(default_factory=set, init=False)  # kinds of pauses
    _has_timed_save: bool = field(default=False, init=False)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._started_at = self._seen_at = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note when a validation begins."""
        self._validating_at = clock_of(pl_module.device)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Note how long a validation took."""
        self._seen_at = clock_of(pl_module.device)
        self.validations.append(self._seen_at - self._validating_at)

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Report what the last step's pauses tell; avoid those of garbage collection."""
        if not self._has_frozen:  # what model, compiler, and Trainer have made stays
            freeze_lasting_objects()
            self._has_frozen = True
        self._seen_at = time.perf_counter()
        if not trainer.is_global_zero:
            return
        if self._origin is None:
            self._origin = step, clock_of(pl_module.device)
            return
        self._check_grace(trainer)
        validation = self._validation_seconds()
        saving = self._saving_seconds()
        known = (validation is not None, saving is not None)
        total_steps = trainer.max_steps
        if known == self._reported or step >= total_steps:
            return
        self._reported = known
        forecast = Forecast(
            self._step_seconds(pl_module.device, step) * (total_steps - step),
            Pauses(validations_after(step, self.val_every, total_steps), validation),
            Pauses(self._saves_after(step, total_steps), saving),
        )
        logger.info("%s", forecast)
        self._warn(forecast)

    def _saves_after(self, step: int, total_steps: int) -> int:
        """Return how many saves follow optimizer step `step`."""
        keeps_best = self.checkpoints.keep_best > 0
        every = self.checkpoints.every
        return saves_after(step, every, self.val_every, total_steps, keeps_best=keeps_best)

    def _validation_seconds(self) -> float | None:
        """Return the seconds of the newest validation; the first may compile the model."""
        first = 1 if self.compiled else 0
        return self.validations[-1] if len(self.validations) > first else None

    def _saving_seconds(self) -> float | None:
        """Return the seconds that training waited for the newest save.

        In background, that is a copy in memory, which the first one allocates, and the end of the
        write before.
        """
        first = 1 if self.background else 0
        saves = self.checkpoints.saves
        return saves[-1].seconds if len(saves) > first else None

    def _step_seconds(self, device: torch.device, step: int) -> float:
        """Return the mean seconds of a step, without pauses, from the second one on."""
        assert self._origin is not None
        first, clock = self._origin
        pauses = sum(self.validations) + self._seconds_of_saves()
        return (clock_of(device) - clock - pauses) / (step - first)

    def _warn(self, forecast: Forecast) -> None:
        """Warn if the pauses take long, and name settings with which they take their limit."""
        both = forecast.known.values()
        share = forecast.share(*both)
        if share <= 2 * LIMIT or sum(pauses.total for pauses in both) < FEW_SECONDS:
            return
        remedies = {}
        if forecast.share(forecast.validation) > LIMIT:
            remedies["validation"] = self._rarer_validation(forecast)
        if forecast.share(forecast.saving) > LIMIT:
            remedies["saving"] = self._rarer_saving(forecast)
        if remedies.keys() <= self._warned:
            return
        self._warned |= remedies.keys()
        logger.warning(
            "%s will take %s of the remaining time, more than %s; set %s",
            " and ".join(forecast.known),
            f"{share:.1%}",
            f"{2 * LIMIT:.0%}",
            ", and ".join(remedies.values()),
        )

    def _rarer_validation(self, forecast: Forecast) -> str:
        excess = forecast.excess(forecast.validation)
        remedy = f"val_every={self.val_every * excess}"
        if self.val_tokens is None or self.tokens_per_step is None:
            return remedy
        if self.val_tokens >= excess * self.tokens_per_step:  # with fewer, ranks would idle
            remedy += f" or data.val_tokens={power_of_two(self.val_tokens // excess)}"
        return remedy

    def _rarer_saving(self, forecast: Forecast) -> str:
        every = self.checkpoints.every or self.val_every
        remedy = f"checkpoint.every={every * forecast.excess(forecast.saving)}"
        if not self.background:
            remedy = f"checkpoint.background=true or {remedy}"
        return remedy

    def _check_grace(self, trainer: Trainer) -> None:
        """Warn once, when the first save is complete, if a signal leaves too little time for it."""
        disk: Any = trainer.strategy.checkpoint_io
        if self._has_timed_save or not self.checkpoints.saves:
            return
        first = self.checkpoints.saves[0]
        written_at = disk.written_at.get(first.path)
        if written_at is None:  # in the background, it is still being written
            return
        self._has_timed_save = True
        seconds = written_at - first.started_at
        grace = self.grace_seconds
        if seconds > grace / 2:
            logger.warning(
                "a save takes %s s, more than half of launch.grace_seconds=%s: after a signal, "
                "ranks might be killed before they have saved; set launch.grace_seconds=%s",
                f"{seconds:.1f}",
                f"{grace:g}",
                10 * math.ceil(3 * seconds / 10),
            )

    def in_summary(self, _step: int) -> dict[str, Any]:
        """Return the shares of the time from before the first step to the last thing done."""
        if self._started_at in (None, self._seen_at):
            return {"validation_share": None, "saving_share": None}
        ended_at = max([self._seen_at, *(save.ended_at for save in self.checkpoints.saves)])
        whole = ended_at - self._started_at
        return {
            "validation_share": sum(self.validations) / whole,
            "saving_share": self._seconds_of_saves() / whole,
        }

    def _seconds_of_saves(self) -> float:
        return sum(save.seconds for save in self.checkpoints.saves)


def clock_of(device: torch.device) -> float:
    """Return the seconds of a clock, once `device` has done everything that was launched."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, which is positive."""
    return int(2 ** math.floor(math.log2(number)))
