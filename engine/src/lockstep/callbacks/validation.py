"""Validates every so many optimizer steps; Lightning counts micro-batches."""

import sys
from typing import Any

from lightning import Callback, Trainer
from torch import Tensor

from lockstep.errors import UserError
from lockstep.settings import check_whole

AFTER_THIS_BATCH = 1  # micro-batches between validations, as Lightning counts them
NOT_YET = sys.maxsize


class ValidateEvery(Callback):
    """Lets a validation follow the optimizer steps that are multiples of `steps`.

    An epoch may end within the accumulation of a step, which then has fewer micro-batches. From
    there on, `Trainer(val_check_interval=...)` would validate in the middle of steps, and after
    others than in a run with more ranks.

    List it first: callbacks after it may ask whether a validation follows. A checkpoint has what
    was measured, which `ReduceLROnPlateau` and others monitor: a resumed run knows it, too.

        >>> trainer = Trainer(callbacks=[lockstep.ValidateEvery(250)])

    Args:
        steps: between validations; None: they follow the Trainer's own arguments.
    """

    def __init__(self, steps: int | None) -> None:
        if steps is not None:
            check_whole("val_every", steps, at_least=1)
        self.steps = steps
        self._seen = 0  # completed steps
        self._measured: dict[str, Tensor] = {}  # by the part of the run before a checkpoint

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Tell callbacks that validations don't follow epochs.

        Raises:
            UserError: the Trainer validates at other times.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.steps = None
        if stage == "fit" and trainer.check_val_every_n_epoch is not None:
            check_whole("check_val_every_n_epoch", trainer.check_val_every_n_epoch, at_least=1)
        if stage != "fit" or self.steps is None:
            return
        nominal = self.steps * trainer.accumulate_grad_batches
        for name, unit, usual in (
            ("val_check_interval", "micro-batches", (1.0, nominal)),
            ("check_val_every_n_epoch", "epochs", (1, None)),
        ):
            value = getattr(trainer, name)
            if value not in usual:
                raise UserError(
                    f"{name}={value} of the Trainer counts {unit}, and ValidateEvery({self.steps}) "
                    "counts steps; leave it out and set val_every, or set val_every=null"
                )
        trainer.val_check_interval = nominal
        trainer.check_val_every_n_epoch = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Pass over the validation of a step after which the run continues; tell its results."""
        trainer.callback_metrics.update(self._measured)
        self._measured = {}
        if self.steps is None:
            return
        self._seen = trainer.global_step
        is_validated = self._seen > 0 and self._seen % self.steps == 0
        trainer.val_check_batch = AFTER_THIS_BATCH if is_validated else NOT_YET

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_batch: Any) -> None:
        """Decide whether a validation follows this micro-batch."""
        if self.steps is None:
            return
        before, self._seen = self._seen, trainer.global_step
        is_due = self._seen // self.steps > before // self.steps
        trainer.val_check_batch = AFTER_THIS_BATCH if is_due else NOT_YET

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Save what callbacks and schedulers monitor."""
        checkpoint["monitored"] = dict(trainer.callback_metrics)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Continue with it; another Trainer's checkpoint has none."""
        saved = checkpoint.get("monitored", {})
        self._measured = {
            name: value.to(pl_module.device, copy=True) for name, value in saved.items()
        }
