"""Measures the run and hands one row to every logger each `log_every` steps."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from lightning import Trainer

from lockstep_gpt.training.callbacks.step import StepCallback

COLUMNS = [
    "trainer/step",
    "trainer/tokens",
    "train/loss",
    "val/loss",
    "val/perplexity",
    "optim/lr",
    "optim/grad_norm",
    "throughput/tokens_per_second",
    "throughput/step_seconds",
]


class Metrics(StepCallback):
    """Reads the device only at logging steps: in between the loss stays there.

    `self.log` would cost a host synchronisation or a bookkeeping round at every micro-batch.
    """

    def __init__(self, every: int, tokens_per_step: int) -> None:
        self.every = every
        self.tokens_per_step = tokens_per_step
        self.row: dict[str, float] = {}  # the newest value of each metric, for whoever shows it
        self.training_seconds = 0.0  # without validation
        self.training_steps = 0
        self._since = (0.0, 0)  # clock and step of the last row
        self._paused_at = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Mean over all ranks and steps of this start of the run, validation excluded."""
        return self.training_steps * self.tokens_per_step / max(self.training_seconds, 1e-9)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._since = (time.perf_counter(), trainer.global_step)

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Log a row where one is due, and at the end."""
        if step % self.every and step != trainer.max_steps:
            return
        assert pl_module.grad_norm is not None
        loss = trainer.strategy.reduce(pl_module.take_loss(), reduce_op="mean")
        loss_value, norm = torch.stack([loss.double(), pl_module.grad_norm.double()]).tolist()
        seconds, steps = self._lap(step)
        self._log(
            trainer,
            step,
            {
                "train/loss": loss_value,
                "optim/lr": pl_module.schedule.lr(step - 1),
                "optim/grad_norm": norm,
                "throughput/tokens_per_second": steps * self.tokens_per_step / seconds,
                "throughput/step_seconds": seconds / steps,
            },
        )

    def _lap(self, step: int) -> tuple[float, int]:
        """Return the seconds and steps since the last row."""
        now = time.perf_counter()
        seconds, steps = now - self._since[0], step - self._since[1]
        self._since = (now, step)
        self.training_seconds += seconds
        self.training_steps += steps
        return seconds, steps

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ARG002
        """Stop the clock: throughput is that of training."""
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the validation loss and let the clock go on."""
        clock, step = self._since
        self._since = (clock + time.perf_counter() - self._paused_at, step)
        assert pl_module.val_loss is not None
        metrics = {"val/loss": pl_module.val_loss, "val/perplexity": math.exp(pl_module.val_loss)}
        self._log(trainer, trainer.global_step, metrics)

    def _log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        row = {"trainer/tokens": step * self.tokens_per_step, **metrics}
        self.row.update(row)
        for logger in trainer.loggers:
            logger.log_metrics(row, step)
