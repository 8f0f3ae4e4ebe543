"""Reports that a time limit of Lightning ended the run; Lightning's own message is not shown."""

from __future__ import annotations

import logging
from typing import Any

from lightning import Callback
from lightning.pytorch.callbacks import Timer

logger = logging.getLogger(__name__)


class TimeLimitReport(Callback):
    """Reports at the end of training if the time limit was reached."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Check each `Timer`; the Trainer's `max_time` is one too."""
        for timer in trainer.callbacks:
            if not isinstance(timer, Timer):
                continue
            left = timer.time_remaining("train")
            if left is not None and left <= 0 and trainer.is_global_zero:
                spent = timer.time_elapsed("train")
                logger.info("the time limit was reached, after %.0f s of training", spent)
