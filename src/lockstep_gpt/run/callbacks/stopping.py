"""Stops a run early, and saves it, on a signal."""

import signal
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer

from lockstep_gpt.processes import STOP_SIGNALS
from lockstep_gpt.run.callbacks.checkpoints import Checkpoints
from lockstep_gpt.run.callbacks.step import StepCallback


class Stopped(BaseException):
    """Training ended early, after saving. Not an `Exception`, so it isn't taken for a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopVote:
    """Stops all ranks after the same step, without any of them waiting for the vote.

    It is an all-reduce over gloo, started after a step and read after the next: no GPU waits.
    """

    def __init__(self) -> None:
        self._group: Any = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self._ballot = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def cast(self, signum: int) -> int:
        """Vote to stop by signal `signum`, or 0 to continue; return the last decision."""
        if self._group is None:
            return signum
        self.close()
        decided = int(self._ballot.item())  # 0 before the first vote
        self._ballot.fill_(signum)
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, self._group, async_op=True)
        return decided

    def close(self) -> None:
        """Wait for the last vote: every rank takes part in the same number of votes."""
        if self._work is not None:
            self._work.wait()


@dataclass(eq=False)
class GracefulStop(StepCallback):
    """Notes a signal; ranks agree on it after a step. Lightning's handler can deadlock them."""

    checkpoints: Checkpoints
    received: int = field(default=0, init=False)  # signal; 0: none
    decided: int = field(default=0, init=False)  # signal on which all ranks stop; 0: none
    loop: Any = field(default_factory=dict, init=False)  # the attributes of Lightning's loop

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Replace Lightning's handlers, which it installs earlier, and turn off its broadcast.

        With several ranks, Lightning broadcasts in each micro-batch whether rank 0 got a SIGTERM,
        which waits for the device (Lightning#21487).
        """
        super().on_train_start(trainer, pl_module)
        self.loop = vars(trainer.fit_loop.epoch_loop)
        self.loop["_broadcast_sigterm_tensor"] = lambda: None
        self.vote = StopVote()
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._note)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.received = signum

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:  # noqa: ARG002
        """Save and stop once all ranks know of a signal.

        If a validation follows, wait for it: else the saved state would mark it as done.
        """
        self.decided = self.vote.cast(self.received)
        if step >= self.checkpoints.total_steps:
            self.decided = 0  # the run ends anyway
        if not self.decided:
            return
        if self.checkpoints.validates(trainer):
            self.checkpoints.urgent = True
        else:
            self.checkpoints.save(trainer)
            self._stop()

    def on_train_batch_start(self, *_arguments: Any) -> None:
        """Stop if a validation came in between."""
        if self.decided:
            self._stop()

    def _stop(self) -> None:
        self.vote.close()
        raise Stopped(self.decided)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ARG002
        """Finish the last vote: a rank that leaves early would fail the others' vote."""
        self.vote.close()
        self.on_exception()

    def on_exception(self, *_: Any) -> None:
        """Restore the broadcast of Lightning's loop."""
        self.loop.pop("_broadcast_sigterm_tensor", None)
