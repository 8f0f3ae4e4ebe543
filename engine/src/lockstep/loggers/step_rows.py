"""Numbers the rows of loggers.

Row 10 of our own loggers has all that belongs to optimizer step 10: what its micro-batches log, and
the validation after it. Lightning counts steps from 0, and tells loggers 9. Those of others get the
same number for our rows, so that one chart has one axis.
"""

from collections.abc import Callable, Iterable

from lightning import Trainer
from lightning.pytorch.loggers import Logger


class StepRows:
    """A logger whose rows belong to optimizer steps, counted from 1, as a base class of it."""

    step_of_run: Callable[[], int] | None = None  # while a run trains: the number of its step

    def row_of(self, step: int | None) -> int | None:
        """Return the row for values that are logged now; `step` says it outside of training."""
        if self.step_of_run is None:
            return step
        return self.step_of_run()


class StepNumber:
    """The number of the step in which values are logged, for the loggers of a Trainer.

    Args:
        trainer: is about to train.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._begun = trainer.global_step

    def begin(self) -> None:
        """Note that a micro-batch begins: it belongs to the step after the completed ones."""
        self._begun = self._trainer.global_step + 1

    def __call__(self) -> int:
        """Return the number, which stays the same from the first micro-batch to the validation.

        With several optimizers, Lightning counts the updates of each, and the last one decides.
        """
        return max(self._begun, self._trainer.global_step)


def number_rows(loggers: Iterable[Logger], number: Callable[[], int] | None) -> None:
    """Let those of `loggers` that are ours take the numbers of rows from the run; None: no more."""
    for logger in loggers:
        if isinstance(logger, StepRows):
            logger.step_of_run = number


def log_row(loggers: Iterable[Logger], row: dict[str, float], step: int) -> None:
    """Log a row of optimizer step `step`, counted from 1, to all `loggers`."""
    for logger in loggers:
        number = step if isinstance(logger, StepRows) else max(step - 1, 0)
        logger.log_metrics(row, number)
