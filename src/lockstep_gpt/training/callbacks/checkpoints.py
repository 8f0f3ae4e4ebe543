"""Saves the run: periodically, at its best, at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lockstep_gpt.config import CheckpointConfig
from lockstep_gpt.training.callbacks.step import StepCallback
from lockstep_gpt.training.checkpoint import checkpoint_path, checkpoints_in, step_of
from lockstep_gpt.training.schedule import BatchPlan


class Checkpoints(StepCallback, Checkpoint):
    """Keeps the newest checkpoints and those of the lowest validation losses.

    Args:
        folder: where they lie; nothing else is there.
        settings: when to save and how many to keep.
        content: what every checkpoint carries beside the state of training.
        batch: what an optimizer step takes.
        total_steps: optimizer steps of the run.
        val_every: optimizer steps between validations.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        content: dict[str, Any],
        batch: BatchPlan,
        total_steps: int,
        val_every: int,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.content = content
        self.batch = batch
        self.total_steps = total_steps
        self.val_every = val_every
        self.urgent = False  # save after the validation that comes, due or not
        self.losses: dict[int, float] = {}  # step of a kept checkpoint -> its validation loss

    def validates(self, step: int) -> bool:
        """Tell whether a validation follows optimizer step `step`."""
        return step % self.val_every == 0 or step == self.total_steps

    def is_due(self, step: int) -> bool:
        """Tell whether optimizer step `step` is saved whatever its loss."""
        every = self.settings.every
        return step == self.total_steps or (every is not None and step % every == 0)

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:  # noqa: ARG002
        """Save here only if no validation follows; else the saved state would claim it was done."""
        if step == self.total_steps:
            trainer.should_stop = True  # Lightning then validates a last time, whatever the step
        if self.is_due(step) and not self.validates(step):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save what is due, or among the best so far."""
        step, loss = trainer.global_step, pl_module.val_loss
        assert loss is not None
        best = sorted([*self.losses.values(), loss])[: self.settings.keep_best]
        if self.urgent or self.is_due(step) or loss in best:
            self.losses[step] = loss
            self.save(trainer)

    def save(self, trainer: Trainer) -> Path:
        """Save the state after the last optimizer step; every rank must call this."""
        path = checkpoint_path(self.folder, trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            self._prune(trainer)
        return path

    def _prune(self, trainer: Trainer) -> None:
        """Delete what is neither among the newest nor the best, now that the new one stands."""
        present = checkpoints_in(self.folder)
        newest = present[-self.settings.keep_last :]
        best = sorted(self.losses, key=self.losses.__getitem__)[: self.settings.keep_best]
        for path in present:
            if path not in newest and step_of(path) not in best:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                self.losses.pop(step_of(path), None)

    @property
    def best(self) -> Path | None:
        """The kept checkpoint of the lowest validation loss."""
        if not self.losses:
            return None
        return checkpoint_path(self.folder, min(self.losses, key=self.losses.__getitem__))

    @property
    def last(self) -> Path | None:
        """The newest checkpoint."""
        return next(reversed(checkpoints_in(self.folder)), None)

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: Any,  # noqa: ARG002
        checkpoint: dict[str, Any],
    ) -> None:
        """Add the configuration, the tokenizer and the counts of samples and tokens."""
        step = trainer.global_step
        checkpoint.update(
            self.content,
            samples=step * self.batch.global_size,
            tokens=step * self.batch.tokens_per_step,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the kept checkpoints, which decide what is best."""
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the losses of those checkpoints that are still there."""
        present = {step_of(path) for path in checkpoints_in(self.folder)}
        losses = state_dict["losses"]
        self.losses = {step: loss for step, loss in losses.items() if step in present}
