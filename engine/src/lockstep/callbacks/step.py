"""Callbacks that run after each optimizer step, and what a callback may add to reports."""

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeVar, runtime_checkable

from lightning import Callback, LightningModule, Trainer

from lockstep.errors import UserError

Part = TypeVar("Part")
COUNTED = "counts_steps"  # in what Lightning knows of a scheduler: its frequency is that of steps


@runtime_checkable
class InReceipt(Protocol):
    """A callback with lines for the receipt, which rank 0 prints before the first step."""

    def receipt_lines(self) -> dict[str, str]:
        """Return label -> line."""


@runtime_checkable
class InSummary(Protocol):
    """A callback with entries for `summary.json`."""

    def in_summary(self, step: int) -> dict[str, Any]:
        """Return name -> value for a run that ends after optimizer step `step`."""


@runtime_checkable
class InRow(Protocol):
    """A callback with columns for the rows of the log."""

    def in_row(self, step: int) -> dict[str, float]:
        """Return column -> value after optimizer step `step`; every rank calls this."""

    def after_row(self, step: int) -> None:
        """Act once the row is written, for example end the run with a `RunError`."""


class StepCallback(Callback, ABC):
    """Calls `on_step_end` after each optimizer step; Lightning's hook fires per micro-batch."""

    _seen = 0
    trains = True  # whether the Trainer was set up to train, not to test with some checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note whether a checkpoint's state is for this callback to continue with."""
        self.trains = stage == "fit"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where a new or resumed run starts."""
        self._seen = trainer.global_step
        count_scheduler_steps(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_batch: Any) -> None:
        """Detect the end of a step among micro-steps."""
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            self.on_step_end(trainer, pl_module, trainer.global_step)

    @abstractmethod
    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Act after optimizer step `step`; the first one is 1."""


def count_scheduler_steps(trainer: Trainer) -> None:
    """Let `frequency` count optimizer steps, as Lightning documents it, once for each scheduler.

    Lightning counts micro-batches, of which a step has others on another number of devices.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and COUNTED not in vars(config):
            vars(config)[COUNTED] = True
            config.frequency *= trainer.accumulate_grad_batches


def only(kind: type[Part], trainer: Trainer, needed_by: Callback) -> Part:
    """Return the Trainer's callback of this class, or raise a `UserError`.

    Args:
        kind: a class of ours.
        trainer: has it.
        needed_by: the callback that asks.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, kind):
            return callback
    needs = f"{type(needed_by).__name__} needs lockstep.{kind.__name__}"
    raise UserError(f"{needs} among the Trainer's callbacks; add it")


def ends_epoch(trainer: Trainer) -> bool:
    """Return whether the step that just ended is the last one of an epoch.

    What happens at the end of it, such as updates of schedulers, isn't in the state of the run yet.
    """
    return trainer.is_last_batch


def updates_after_batch(trainer: Trainer) -> bool:
    """Return whether an update follows the micro-batch that is running, not another micro-batch."""
    number = trainer.fit_loop.batch_idx + 1
    return number % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
