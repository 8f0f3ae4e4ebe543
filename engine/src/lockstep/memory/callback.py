"""Keeps the newest state in each machine's memory, for ranks that restart."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy

from lockstep.callbacks.guards import without_comparison
from lockstep.callbacks.step import StepCallback, ends_epoch, only
from lockstep.callbacks.stopping import GracefulStop
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.content import plain
from lockstep.checkpoints.finite_states import own_part, refuse_broken_state
from lockstep.checkpoints.reading import step_of
from lockstep.checkpoints.room import size_of
from lockstep.memory import files
from lockstep.memory.files import KeptState, SharedMemoryError, make_folder
from lockstep.memory.room import refuse_little_room
from lockstep.memory.turns import MemoryTurns
from lockstep.memory.writer import MemoryWriter, writer_of
from lockstep.patches.lightning import state_of
from lockstep.ranks.ranks import (
    Ranks,
    from_each_rank,
    from_rank_zero,
    is_restart,
)
from lockstep.run.run import Run
from lockstep.settings import check, counted, not_a_config
from lockstep.strategies.placing import ShardedStates, layout_of
from lockstep.strategies.restored_states import copy_restored_state

logger = logging.getLogger(__name__)


@not_a_config
@dataclass(eq=False)
class StateInMemory(StepCallback, Checkpoint):
    """Keeps, on a rank of each machine, what a checkpoint would have; all ranks take part.

    Ranks that restart continue from it. It needs `Checkpoints(run)` before it, whose newest
    checkpoint the state then knows, and `GracefulStop()`, in whose votes the ranks agree to keep a
    state. Lightning moves a `Checkpoint` behind all callbacks that aren't.

        >>> run = lockstep.Run.alone()
        >>> states = lockstep.StateInMemory(run, every=10)
        >>> callbacks = [lockstep.GracefulStop(), lockstep.Checkpoints(run), states]
        >>> trainer = Trainer(callbacks=callbacks, plugins=run.plugins)

    Args:
        run: whose state this is; None: this process's.
        every: steps between states; auto: in 1 % of the time, unless there is one rank; False:
            none is kept.
    """

    run: Run | None = None
    every: int | str | bool = "auto"
    turns: MemoryTurns = field(init=False)
    ranks: Ranks = field(init=False)
    writer: MemoryWriter | None = field(default=None, init=False)  # None: another rank writes
    line: str | None = field(default=None, init=False)  # what rank 0 says when training begins
    checkpoints: Checkpoints = field(init=False, repr=False)  # of the same Trainer
    _run: Run = field(init=False)
    _has_writer: bool = field(default=False, init=False)  # whether it is known who writes
    _saves_parts: bool = field(default=False, init=False)  # then checkpoints have no hash
    _size: int = field(default=0, init=False)  # bytes of a state
    _resumes: bool = field(default=False, init=False)  # whether the run continues from one
    _waits: bool = field(default=False, init=False)  # for the end of a validation
    _told: bool = field(default=False, init=False)  # the interval
    _clock: float = field(default=0.0, init=False)  # after the last step; 0: it was interrupted

    def __post_init__(self) -> None:
        is_count = type(self.every) is int and self.every >= 1
        fits = is_count or self.every is False or self.every == "auto"
        check("memory", self.every, fits, "must be auto, false, or a number of steps from 1 on")
        self._run = self.run or Run.current()
        self.ranks = self._run.ranks
        self.turns = MemoryTurns(self.every)

    def writer_for(self, trainer: Trainer) -> MemoryWriter | None:
        """Return what writes this machine's states, on the ranks that do; None: nothing does.

        Every rank must call this. `Run.checkpoint` does so before it looks for a state.
        """
        if not self._has_writer:
            self._has_writer = True
            self.writer = self._make_writer(trainer)
        return self.writer

    def keeps_states(self, trainer: Trainer) -> bool:
        """Return whether a state may be kept, and the run may continue from one."""
        return self.every is not False and not getattr(trainer, "fast_dev_run", False)

    def _make_writer(self, trainer: Trainer) -> MemoryWriter | None:
        if not self.keeps_states(trainer):
            return None
        strategy = trainer.strategy
        return writer_of(
            self._run.directory,
            self.ranks,
            sharded=self.ranks.world_size > 1 and isinstance(strategy, ShardedStates),
            tensor_parallel=getattr(strategy, "tensor_parallel", 1),
            timeout=self._run.timeout,
        )

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Take the memory, on the ranks that write; say so on rank 0.

        Raises:
            UserError: the Trainer lacks a callback that this one needs.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or not self.keeps_states(trainer):
            return
        self.checkpoints = only(Checkpoints, trainer, self)
        only(GracefulStop, trainer, self)
        self._saves_parts = getattr(trainer.strategy, "saves_parts", False)
        self.writer_for(trainer)
        self.prepare(trainer.strategy, bytes_of_state(pl_module))
        if self.line is not None and self.ranks.rank == 0 and not is_restart():
            logger.info("  %-9s  %s", "memory", self.line)

    def prepare(self, strategy: Strategy, size: int) -> None:
        """Take the memory for states of `size` bytes, unless this `strategy` has none to keep."""
        resumed = self._run.resumed
        self._size = size
        self._resumes = isinstance(resumed, KeptState)
        is_pointless = self.ranks.world_size == 1
        if self.writer is None or self.writer.shards is None:  # else all ranks must agree
            is_pointless |= not files.SHARED_MEMORY.is_dir()
        if self.every == "auto" and is_pointless:
            self.writer = None
            return
        if getattr(strategy, "loses_error", False):
            self.writer = None
            self.line = "off: no state has powersgd's accumulated error"
            return
        if not isinstance(strategy, ShardedStates) and not layout_of(strategy).has_replicas:
            self.writer = None
            self.line = "off: each rank has only a part of it"
            return
        if self.writer is None:
            return
        fault = self._start(self.writer, resumed if isinstance(resumed, KeptState) else None)
        if fault is not None:
            self.line = f"off: {fault}"
            self.writer.close()
            if self.ranks.rank > 0 and self.writer.shards is None:  # else rank 0 says it
                logger.warning("this machine keeps no state in memory: %s", fault)
            return
        self.turns.is_on = self.ranks.rank == 0
        self.line = self._line_of_states()

    def _start(self, writer: MemoryWriter, kept: KeptState | None) -> str | None:
        """Take the memory; return why that fails, on any rank if each writes its shards."""
        shards = writer.shards
        if shards is not None:
            if kept is not None and (kept.parts or not kept.header.part):
                kept = None  # of other ranks
            shards.begin_era(kept)
            self._size = -(-self._size // self.ranks.world_size)
        fault = None
        try:
            if self.every == "auto":
                refuse_little_room(make_folder(writer.identity), self._size_on_machine())
            writer.start(self._size, kept)
        except SharedMemoryError as error:
            fault = str(error)
        if shards is None:
            return fault
        lacks_copy = kept is not None and not shards.has_copy
        answers = from_each_rank((fault, lacks_copy))
        fault = next((answer for answer, _ in answers if answer is not None), None)
        if fault is None and kept is not None and any(lacks for _, lacks in answers):
            writer.copy_to_next_machine(kept)
        return fault

    def _line_of_states(self) -> str:
        if self.every == "auto":
            rate = "as often as it takes 1 % of the time"
        else:
            rate = f"every {self.every} steps"
        what = "the newest state"
        if self.writer is not None and self.writer.shards and self.writer.shards.ring:
            what += ", and a copy of another machine's part"
        size = self._size_on_machine() / 2
        return f"{what}, {rate}; 2 x {size / 1e6:,.1f} MB of each machine's memory"

    def _size_on_machine(self) -> int:
        """Return the bytes that all ranks of this machine need for two states."""
        size = 2 * self._size
        if self.writer is not None and self.writer.shards is not None:
            size *= self.ranks.local_world_size
            if self.writer.shards.ring is not None:
                size *= 2  # copies
        return size

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note where training begins."""
        super().on_train_start(trainer, pl_module)
        if self._resumes:
            for optimizer in trainer.optimizers:
                copy_restored_state(optimizer)
        self.turns.begin(trainer.global_step)
        self.turns.is_blocked = self._is_blocked
        if self.writer is not None and self.writer.shards is not None:
            self.turns.is_unable = self._is_unable

    def _is_blocked(self) -> bool:
        """Return whether a state or the hash of a checkpoint isn't complete yet."""
        if self.writer is None or self._is_unable():
            return True
        self._note_background(self.writer)
        if self._saves_parts:
            return False  # then checkpoints have no hash
        saves = self.checkpoints.saves
        return bool(saves) and step_of(saves[-1]) not in self._run.hashes.weights

    def _is_unable(self) -> bool:
        """Return whether this rank's part of a state isn't complete yet, or can't be kept."""
        assert self.writer is not None
        if self.turns.setting != "auto":  # the writer waits: each due state is kept
            return not self.writer.is_on
        return not self.writer.is_on or self.writer.is_busy()

    def _note_background(self, writer: MemoryWriter) -> None:
        """Note the work next to training, which takes time from it only on CPUs."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.turns.background = writer.seconds

    def on_before_optimizer_step(self, *_arguments: Any) -> None:
        """Let the update wait for copies of what it changes."""
        if self.writer is not None:
            self.writer.copies.hold_update()

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Keep the state if all ranks have decided to, once the step is finished."""
        now = time.perf_counter()
        if self._clock:
            self.turns.note_step(now - self._clock)
        self._clock = now
        self._tell_interval()
        if not self.turns.decided or step == trainer.max_steps or trainer.should_stop:
            return
        if self.checkpoints.is_unfinished(trainer):
            self._waits = True
        else:
            self._keep(trainer, pl_module, step)

    def _tell_interval(self) -> None:
        """Log, once, how often rank 0 wants to keep the state."""
        interval = self.turns.interval
        is_open = self.turns.is_on and not self._told and interval is not None
        if self.turns.setting != "auto" or not is_open or self._is_blocked():
            return
        self._told = True
        logger.info(
            "keeps the state in memory every %s, at %.1f ms each: a restart repeats no more",
            counted(interval or 1, "step"),
            1000 * self.turns.cost,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep the state that has waited for the validation."""
        self._clock = 0.0
        if self._waits and not trainer.should_stop and not ends_epoch(trainer):
            self._keep(trainer, pl_module, trainer.global_step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep the state that has waited for the end of the epoch before."""
        if self._waits:
            self._keep(trainer, pl_module, trainer.global_step)

    def _keep(self, trainer: Trainer, module: Any, step: int) -> None:
        self._waits = False
        self._clock = 0.0
        if module.device.type == "cpu":
            trainer.strategy.barrier()  # the next gradients would wait for the slowest rank too
        started = time.perf_counter()
        refuse_broken_state(trainer, self.checkpoints.newest)  # no later step would be better
        state = kept_state(trainer)
        weights = self._run.hashes.weights
        is_whole = self.writer is None or self.writer.shards is None
        if self.ranks.num_nodes > 1 and is_whole:
            weights = from_rank_zero(weights)
        if self.writer is None:
            return
        if module.device.type == "cuda":
            self.writer.copies.updated = addresses_of_updated(trainer, module)
        content, _ = plain({**state, "weights": weights})  # as in a checkpoint, which says so
        self.writer.write(step, content)
        self.turns.note_state(time.perf_counter() - started)

    def on_train_end(self, *_arguments: Any) -> None:
        """Finish what is being written."""
        self._has_writer = False  # another fit makes its own
        if self.writer is not None:
            self.writer.close()

    def on_exception(self, trainer: Trainer, *_arguments: Any) -> None:
        """Do the same, unless that might wait for a lost peer: for its part, or for a kernel."""
        if self.writer is None or self.writer.shards is not None:
            return
        if trainer.strategy.root_device.type == "cpu":
            self.writer.close()

    def in_summary(self, _step: int) -> dict[str, Any]:
        """Return the steps between two states at the end; None: none was kept."""
        return {"memory_every": self.turns.interval if self.turns.is_on else None}


def bytes_of_state(module: torch.nn.Module) -> int:
    """Return about how many bytes a state has: weights, and two moments of those that train."""
    trained = sum(weight.nbytes for weight in module.parameters() if weight.requires_grad)
    return size_of(module.state_dict()) + 2 * trained


def kept_state(trainer: Trainer) -> dict[str, Any]:
    """Return what this rank keeps: what a checkpoint would have, or its own part of it.

    Every rank must call this.
    """
    strategy = trainer.strategy
    with without_comparison(trainer):
        if not isinstance(strategy, ShardedStates):
            return state_of(trainer)
        with strategy.states_in_shards():
            return strategy.state_of_rank(state_of(trainer))


def addresses_of_updated(trainer: Trainer, module: torch.nn.Module) -> set[int]:
    """Return the addresses of the tensors that only an update changes: weights and moments."""
    tensors: list[torch.Tensor] = [*module.parameters()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {own_part(tensor).data_ptr() for tensor in tensors}
