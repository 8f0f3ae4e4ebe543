"""Turns a signal into: finish the step, save together, exit."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from lightning import Trainer

from lockstep_gpt.training.callbacks.checkpoints import Checkpoints
from lockstep_gpt.training.callbacks.step import StepCallback
from lockstep_gpt.training.ranks import StopVote

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stopped(BaseException):
    """Training ended early, after saving, because a signal asked for it.

    No `Exception`: nothing on the way up should take it for a failure.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


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
