"""Stops a run early, and saves it, on a signal."""

import contextlib
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer

from lockstep import stop_signals
from lockstep.callbacks.step import StepCallback
from lockstep.checkpoints.callback import Checkpoints
from lockstep.errors import RunError
from lockstep.memory.turns import KEEP, NOTHING, MemoryTurns
from lockstep.patches.lightning import wait_of, without_sigterm_broadcasts
from lockstep.ranks.ranks import LONGEST_WAIT, gloo_group, meeting_store
from lockstep.settings import not_a_config

LEAVING_SECONDS = 60.0  # that a rank which leaves training waits for the others


class StopVote:
    """Stops all ranks after the same step, without any of them waiting for the vote.

    It is an all-reduce over gloo, started after a step and read after the next: no GPU waits.
    It also carries the ballots on keeping the state in memory, and on `trainer.should_stop`.

    Args:
        seconds: the longest wait for another rank.
    """

    def __init__(self, seconds: float) -> None:
        self._group: Any = None
        if dist.is_initialized():
            self._group = gloo_group(seconds)
        self._ballot = torch.zeros(4, dtype=torch.int64)
        self._work: dist.Work | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return self._group is None

    def result(self) -> tuple[int, bool]:
        """Return the signal on which all ranks stop, or 0, and whether they keep the next state."""
        self.close()
        stop, keep, *_ = self._ballot.tolist()  # zeros before the first vote
        return stop, keep == KEEP

    def some_end(self) -> bool:
        """Return whether a rank's `trainer.should_stop` was set at the last vote."""
        self.close()
        return bool(self._ballot[2])

    def all_end(self) -> bool:
        """Return whether it was set on all ranks, after waiting for their votes."""
        return self.some_end() and not self._ballot[3]

    def cast(self, signum: int, ballot: int = NOTHING, *, ends: bool = False) -> None:
        """Vote to stop by signal `signum`, or 0 to continue; `result` is for the next step.

        Args:
            signum: on which this rank wants to stop.
            ballot: on keeping the state after the next step.
            ends: whether `trainer.should_stop` is set on this rank.
        """
        self._ballot = torch.tensor([signum, ballot, ends, not ends])
        if not self.is_alone:
            maximum = dist.ReduceOp.MAX
            self._work = dist.all_reduce(self._ballot, maximum, self._group, async_op=True)

    def close(self) -> None:
        """Wait for the last vote: every rank takes part in the same number of votes."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def refuse_to_leave_alone(step: int) -> None:
    """Raise a `RunError` unless all ranks leave training after this step.

    A hook that comes after all callbacks, such as the module's `on_train_batch_end`, has set
    `trainer.should_stop`. If it did so on this rank only, the others would wait for this one.
    """
    store = meeting_store()
    if store is None:
        return
    keys = [f"rank {rank} leaves after {step}" for rank in range(dist.get_world_size())]
    limit = time.monotonic() + LEAVING_SECONDS
    # Whoever serves the store leaves once all have come, perhaps before this rank sees it.
    with contextlib.suppress(dist.DistNetworkError):
        store.set(keys[dist.get_rank()], "")
        while not store.check(keys):
            if time.monotonic() > limit:
                raise RunError(
                    f"trainer.should_stop=True was set on rank {dist.get_rank()} after step "
                    f"{step}, and not on all ranks within {LEAVING_SECONDS:g} s; set it on all of "
                    "them, or in a callback before GracefulStop"
                )
            time.sleep(0.05)


@not_a_config
@dataclass(eq=False)
class GracefulStop(StepCallback):
    """Notes a signal; ranks agree on it after a step. Lightning's handler can deadlock them.

    They also agree on `trainer.should_stop`: set on all ranks, it ends training after the same
    step, and set on some, after the next one. Lightning alone would let these ranks leave the
    others, which wait for them. Between the micro-batches of a step, nothing ends.

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
    _wants_end: bool = field(default=False, init=False)  # `should_stop` was set within a step
    _agreed: bool = field(default=False, init=False)  # all ranks have, or will have, `should_stop`
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
        self._wants_end = self._agreed = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_batch: Any) -> None:
        """Finish the step before training ends."""
        before = self._seen
        super().on_train_batch_end(trainer, pl_module, *_batch)
        if self._seen == before and trainer.should_stop and not self._agreed:
            trainer.should_stop = False
            self._wants_end = True

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Save and stop once all ranks know of a signal, and the step is finished."""
        signum = int(stop_signals.received.first or 0)
        assert self.turns is not None, "set up with the Trainer"
        self.decided, is_kept = self.vote.result()
        self.turns.decide(step, is_kept)
        if self.vote.some_end():  # on another rank, after the step before
            self._end(trainer)
        wants_end = trainer.should_stop or self._wants_end
        self._wants_end = False
        self.vote.cast(signum, self.turns.ballot(step + 1), ends=wants_end and not self._agreed)
        if wants_end and (self.vote.is_alone or self.vote.all_end()):
            self._end(trainer)
        trainer.should_stop = self._agreed  # else after the next step
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

    def _end(self, trainer: Trainer) -> None:
        """End training after this step, as all ranks do."""
        self._agreed = True
        trainer.should_stop = True

    def _end_together(self, trainer: Trainer) -> None:
        """Set `trainer.should_stop` where another rank has set it; all ranks are here."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or self.vote.is_alone:
            return
        signum, is_kept = self.vote.result()  # of the step before
        some_end = self.vote.some_end()
        self.vote.cast(signum, KEEP if is_kept else NOTHING, ends=trainer.should_stop or some_end)
        if self.vote.some_end():
            self._end(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Wait for the others, where Lightning validates because training ends."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._leave_together(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Agree on `trainer.should_stop`, which an early stopping may have set."""
        self._end_together(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Do the same at the end of an epoch."""
        if trainer.is_last_batch:  # else some ranks, or all, leave in the middle of it
            self._end_together(trainer)
        self._leave_together(trainer)

    def _stop(self, *, saved: bool = True) -> None:
        stop_signals.received.has_saved = saved
        self.vote.close()
        raise stop_signals.Stopped(self.decided, saved=saved)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Finish the last vote: a rank that leaves early would fail the others' vote."""
        stop_signals.received.has_saved = True
        self.vote.close()
        self._leave_together(trainer)

    def _leave_together(self, trainer: Trainer) -> None:
        is_planned = self._agreed or trainer.global_step == trainer.max_steps
        if trainer.should_stop and not (is_planned or self.vote.is_alone):
            refuse_to_leave_alone(trainer.global_step)
            self._agreed = True

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Leave the Trainer, and signals, as they were."""
        self._undo.close()

    def on_exception(self, *_: Any) -> None:
        """Do the same after an exception."""
        self._undo.close()
