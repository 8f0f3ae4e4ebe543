"""A callback that writes a line for each step of rank 0; `notes.py` reads them."""

from typing import Any

import lightning
from noted import note


class Steps(lightning.Callback):
    """Notes the end of each optimizer step of rank 0."""

    def __init__(self) -> None:
        self.last = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Detect the end of a step among micro-steps."""
        if trainer.is_global_zero and trainer.global_step > self.last:
            self.last = trainer.global_step
            note("step", self.last)
