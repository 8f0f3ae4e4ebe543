"""Saves the run: periodically, at its best, at its end, and when a signal asks it to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lockstep_gpt.config import CheckpointConfig
from lockstep_gpt.training.checkpoint import checkpoint_path, checkpoints_in, step_of
from lockstep_gpt.training.module import StepCallback
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


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stopped(BaseException):
    """Training ended early, after saving, because a signal asked for it.

    No `Exception`: nothing on the way up should take it for a failure.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopVote:
    """Lets all ranks stop after the same step, without any of them waiting for the vote.

    A vote is an all-reduce that is started at the end of a step and read at the end of the next,
    when it has long arrived. It goes over a gloo group, so no GPU is synchronised for it.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._ballot = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def cast(self, signum: int) -> int:
        """Vote for stopping by signal `signum`, 0 for going on; return what was decided."""
        if self._group is None:
            return signum
        decided = 0
        if self._work is not None:
            self._work.wait()
            decided = int(self._ballot.item())
        self._ballot.fill_(signum)
        self._work = dist.all_reduce(
            self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return decided

    def close(self) -> None:
        """Wait for the last vote: every rank takes part in the same number of them."""
        if self._work is not None:
            self._work.wait()


class GracefulStop(StepCallback):
    """The handler only notes the signal; ranks agree on it at the end of an optimizer step.

    Lightning's own handler broadcasts from inside the handler, which can deadlock.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.received = 0
        self.decided = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Take over from Lightning's handlers, which it installs before."""
        super().on_train_start(trainer, pl_module)
        self.vote = StopVote()
        for signum in SIGNALS:
            signal.signal(signum, self._note)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.received = signum

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:  # noqa: ARG002
        """Save and stop once all ranks know of a signal.

        Where a validation follows, only after it: else the saved state would claim it was done.
        """
        decided = self.vote.cast(self.received)
        self.decided = decided if step < self.checkpoints.total_steps else 0
        if self.decided and self.checkpoints.validates(step):
            self.checkpoints.urgent = True
        elif self.decided:
            self.checkpoints.save(trainer)
            self._stop()

    def on_train_batch_start(self, *_arguments: Any) -> None:
        """Stop where a validation came between."""
        if self.decided:
            self._stop()

    def _stop(self) -> None:
        self.vote.close()
        raise Stopped(self.decided)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ARG002
        """Read the last vote, or a rank could leave while another still counts on it."""
        self.vote.close()
