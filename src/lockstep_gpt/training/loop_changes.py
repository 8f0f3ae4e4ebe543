"""What we change in Lightning's training loop, why, and how we undo it."""

import contextlib
from typing import Any

from lightning import Callback
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector


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


class LoopChanges(Callback):
    """Changes what ranks wait for, and how steps are counted, in Lightning's loop.

    - With several ranks it broadcasts at every micro-batch whether rank 0 got a SIGTERM, and waits
      for the device to know (Lightning#21487). Our own vote on signals replaces that.
    - It logs values of callbacks and modules at the previous step's number; here, at their own.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Change the loop that is about to begin."""
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        loop._broadcast_sigterm_tensor = lambda: None
        self._undo.callback(delattr, loop, "_broadcast_sigterm_tensor")
        self._undo.callback(setattr, connector, "__class__", type(connector))
        connector.__class__ = StepAxis
        loop._batches_that_stepped = trainer.global_step + 1  # the next step, not those done

    def on_train_end(self, *_: Any) -> None:
        """Restore everything; a second call does nothing."""
        self._undo.close()

    on_exception = on_train_end  # type: ignore[assignment]
