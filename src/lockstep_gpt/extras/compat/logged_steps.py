"""What users log is numbered by its own step; a time limit that ended the run is reported."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from lightning import Callback
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

logger = logging.getLogger(__name__)


class StepAxis(_LoggerConnector):
    """Logs a step's values at its number, counted from 1; Lightning counts from 0."""

    @property
    def should_update_logs(self) -> bool:
        """Return whether values logged now reach the loggers."""
        trainer: Any = self.trainer
        if not trainer.training:
            return super().should_update_logs
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        return bool(step % trainer.log_every_n_steps == 0 or trainer.should_stop)


class LoggedSteps(Callback):
    """Logs values of callbacks and modules at their own step's number, not at the previous one's.

    At the end of training, it reports a time limit that was reached: Lightning's own message is
    not shown.
    """

    def __init__(self, *_: Any) -> None:
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Change how the loop that is about to begin counts."""
        connector = trainer._logger_connector
        self._undo.callback(setattr, connector, "__class__", type(connector))
        connector.__class__ = StepAxis
        loop = trainer.fit_loop.epoch_loop
        loop._batches_that_stepped = trainer.global_step + 1  # the next step, not those done

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Restore the loop, and check each `Timer`; the Trainer's `max_time` is one too."""
        self._undo.close()
        for timer in (each for each in trainer.callbacks if isinstance(each, Timer)):
            left = timer.time_remaining("train")
            if left is not None and left <= 0 and trainer.is_global_zero:
                spent = timer.time_elapsed("train")
                logger.info("the time limit was reached, after %.0f s of training", spent)

    def on_exception(self, *_: Any) -> None:
        """Restore the loop."""
        self._undo.close()
