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

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Take over from Lightning's handlers, which it installs before."""
        super().on_train_start(trainer, pl_module)
        self.vote = StopVote()
        for signum in SIGNALS:
            signal.signal(signum, self._note)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.received = signum

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:  # noqa: ARG002
        """Save and raise `Stopped` once all ranks know of a signal."""
        decided = self.vote.cast(self.received)
        if decided and step < self.checkpoints.total_steps:
            self.checkpoints.save(trainer)
            self.vote.close()
            raise Stopped(decided)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ARG002
        """Read the last vote, or a rank could leave while another still counts on it."""
        self.vote.close()
