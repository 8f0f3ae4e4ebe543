"""Stops a run early, and saves it, on a signal."""

import signal
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer

from lockstep import stop_signals
from lockstep.callbacks.step import StepCallback
from lockstep.checkpoints.callback import Checkpoints
from lockstep.memory.turns import KEEP, NOTHING, MemoryTurns
from lockstep.patches.lightning import wait_of, without_sigterm_broadcasts
from lockstep.ranks.ranks import LONGEST_WAIT, gloo_group
from lockstep.settings import not_a_config


class Stopped(BaseException):
    """Training ended early. Not an `Exception`, so it isn't taken for a failure.

    Args:
        signum: the signal that stopped it.
        saved: whether all ranks have saved.
    """

    def __init__(self, signum: int, *, saved: bool = True) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.saved = saved


class StopVote:
    """Stops all ranks after the same step, without any of them waiting for the vote.

    It is an all-reduce over gloo, started after a step and read after the next: no GPU waits.
    It also carries the ballots on keeping the state in memory.

    Args:
        seconds: the longest wait for another rank.
    """

    def __init__(self, seconds: float) -> None:
        self._group: Any = None
        if dist.is_initialized():
            self._group = gloo_group(seconds)
        self._ballot = torch.zeros(2, dtype=torch.int64)
        self._work: dist.Work | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return self._group is None

    def result(self) -> tuple[int, bool]:
        """Return the signal on which all ranks stop, or 0, and whether they keep the next state."""
        self.close()
        stop, keep = self._ballot.tolist()  # zeros before the first vote
        return stop, keep == KEEP

    def cast(self, signum: int, ballot: int = NOTHING) -> None:
        """Vote to stop by signal `signum`, or 0 to continue; `result` is for the next step.

        Args:
            signum: on which this rank wants to stop.
            ballot: on keeping the state after the next step.
        """
        self._ballot = torch.tensor([signum, ballot])
        if not self.is_alone:
            maximum = dist.ReduceOp.MAX
            self._work = dist.all_reduce(self._ballot, maximum, self._group, async_op=True)

    def close(self) -> None:
        """Wait for the last vote: every rank takes part in the same number of votes."""
        if self._work is not None:
            self._work.wait()


@not_a_config
@dataclass(eq=False)
class GracefulStop(StepCallback):
    """Notes a signal; ranks agree on it after a step. Lightning's handler can deadlock them.

    It takes part in one Trainer, and leaves Lightning and the process as they were.

        >>> trainer = Trainer(callbacks=[lockstep.GracefulStop()])

    Args:
        checkpoints: save when it stops; None: those of the Trainer.
        turns: of keeping states in memory, on which the ranks also agree; None: those of the
            Trainer's `StateInMemory`.
        timeout: the longest wait for another rank in seconds; None: the run's.
    """

    checkpoints: Checkpoints | None = None  # what saves; None: that of the Trainer, if there is one
    turns: MemoryTurns | None = None  # when the state is kept in memory; None: the Trainer's
    # Seconds that a rank waits for another one's vote; None: as long as the strategy waits.
    timeout: float | None = None
    decided: int = field(default=0, init=False)  # signal on which all ranks stop; 0: none
    _undo: ExitStack = field(default_factory=ExitStack, init=False)  # what it changes

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Keep Lightning from broadcasts, in a signal's handler and in each micro-batch."""
        super().setup(trainer, pl_module, stage)
        self._undo.close()
        self._undo.enter_context(without_sigterm_broadcasts(trainer))
        if stage == "fit":
            self._undo.enter_context(stop_signals.noted())
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self.checkpoints is None:
            saving = (callback for callback in callbacks if isinstance(callback, Checkpoints))
            self.checkpoints = next(saving, None)
        if self.turns is None:
            turns = (getattr(callback, "turns", None) for callback in callbacks if callback != self)
            self.turns = next(filter(None, turns), MemoryTurns())

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Prepare the votes, which also count a signal that has come before."""
        super().on_train_start(trainer, pl_module)
        self.vote = StopVote(self.timeout or wait_of(trainer, LONGEST_WAIT))

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Save and stop once all ranks know of a signal, and the step is finished."""
        signum = int(stop_signals.received.first or 0)
        assert self.turns is not None, "set up with the Trainer"
        self.decided, is_kept = self.vote.result()
        self.turns.decide(step, is_kept)
        self.vote.cast(signum, self.turns.ballot(step + 1))
        if self.vote.is_alone:
            self.decided = signum  # at once
        if step == trainer.max_steps:
            self.decided = 0  # the run ends anyway
        if not self.decided:
            return
        if self.checkpoints is None:  # nothing saves this run
            self._stop(saved=False)
        elif self.checkpoints.is_unfinished(trainer):
            self.checkpoints.urgent = True
        else:
            self.checkpoints.save(trainer)
            self._stop()

    def on_train_batch_start(self, *_arguments: Any) -> None:
        """Stop if a validation, or the end of an epoch, came in between."""
        if self.decided:
            self._stop()

    def _stop(self, *, saved: bool = True) -> None:
        stop_signals.received.has_saved = saved
        self.vote.close()
        raise Stopped(self.decided, saved=saved)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Finish the last vote: a rank that leaves early would fail the others' vote."""
        stop_signals.received.has_saved = True
        self.vote.close()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Leave the Trainer, and signals, as they were."""
        self._undo.close()

    def on_exception(self, *_: Any) -> None:
        """Do the same after an exception."""
        self._undo.close()
