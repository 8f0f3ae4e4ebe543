"""Keeps a run's newest state in a machine's memory: copied at once, completed in the background."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning import Trainer

from lockstep.memory.copies import DeviceCopies
from lockstep.memory.files import (
    Identity,
    KeptState,
    SharedMemoryError,
    claim_name,
    identity_of,
    make_folder,
    remove_states,
)
from lockstep.memory.shards import RankShards
from lockstep.memory.slots import Layout, Slot, SlotPair
from lockstep.memory.states import mapped
from lockstep.ranks.ranks import LONGEST_WAIT, Ranks
from lockstep.run.directory import RunDirectory

logger = logging.getLogger(__name__)


@runtime_checkable
class KeepsStates(Protocol):
    """What keeps states in memory: the callback `StateInMemory`."""

    def keeps_states(self, trainer: Trainer) -> bool:
        """Return whether a state may be kept, and the run may continue from one."""

    def writer_for(self, trainer: Trainer) -> MemoryWriter | None:
        """Return what writes this machine's states; every rank must call this."""


def writer_of(
    directory: RunDirectory,
    ranks: Ranks,
    *,
    sharded: bool = False,
    tensor_parallel: int = 1,
    timeout: float = LONGEST_WAIT,
) -> MemoryWriter | None:
    """Return what writes this machine's states, on its first rank; None on the others.

    Every rank must call this.

    Args:
        directory: the run.
        ranks: this process among all.
        sharded: whether each rank has shards of the state, and writes its own.
        tensor_parallel: how many ranks split layers.
        timeout: the longest wait for another rank in seconds.
    """
    identity = identity_of(directory)
    if identity is None:
        return None
    if sharded:
        shards = RankShards.connected(ranks, timeout, tensor_parallel)
        return MemoryWriter(identity, shards)
    if ranks.local_rank > 0:
        return None
    return MemoryWriter(identity)


class MemoryWriter:
    """What one rank of a machine writes to its memory.

    If that fails, one warning says why, and the run goes on with its disk alone.

    Args:
        identity: of the run.
        shards: what this rank keeps, if it isn't the whole state.
    """

    def __init__(self, identity: Identity, shards: RankShards | None = None) -> None:
        self.identity = identity
        self.shards = shards
        self.fault: str | None = None  # why nothing is kept any more
        self.seconds = 0.0  # of work in the background that competes with training, per state
        self.copies = DeviceCopies()
        self._folder: Path | None = None
        self._name = ""
        self._lock: Any = None  # kept open
        self._pair: SlotPair | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[float] | None = None

    @property
    def is_on(self) -> bool:
        """Whether states are kept."""
        return self._pair is not None and self.fault is None

    def slot_for_copy(self) -> Slot:
        """Return a slot for a state of another machine, or raise a `SharedMemoryError`."""
        self._claim()
        assert self._folder is not None
        return SlotPair(self._folder, self._name).next_slot()

    def _claim(self) -> None:
        if self._folder is None:
            self._folder = make_folder(self.identity)
            self._name, self._lock = claim_name(self._folder)

    def start(self, size: int, kept: KeptState | None) -> None:
        """Take memory for two states of `size` bytes, or raise a `SharedMemoryError`.

        Args:
            size: bytes that a state needs.
            kept: what the run continues from; it stays until the first new state is complete.
        """
        self._claim()
        assert self._folder is not None
        name = self.shards.name if self.shards else self._name
        pair = SlotPair(self._folder, name, kept.path if kept else None)
        pair.reserve(size)
        if self.shards is not None:
            self.shards.start(self.identity, size, kept)
        self._pair = pair
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")

    def copy_to_next_machine(self, kept: KeptState) -> None:
        """Give the next machine what the run continues from, in the background."""
        assert self._thread is not None
        assert self.shards is not None
        self._pending = self._thread.submit(self.shards.copy, kept.header, mapped(kept))

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state after `step` to a slot; complete it in the background."""
        self._finish()
        if self._pair is None or self._thread is None or self.fault is not None:
            return
        try:
            layout = Layout(state)
            slot = self._pair.next_slot()
            slot.reserve(layout.size)
            self.copies.pin(slot.content)
            slot.fill(layout, self.copies.start)
            self._pending = self._thread.submit(self._seal, slot, layout, step)
        except SharedMemoryError as error:
            if self.shards is not None:
                self._thread.submit(self.shards.skip)  # whose own fault would say no more
            self._give_up(error)

    def _seal(self, slot: Slot, layout: Layout, step: int) -> float:
        """Complete a state in the thread; return the CPU time that it took there."""
        assert self._pair is not None
        started = time.thread_time()
        self.copies.wait()
        layout.tensors.clear()  # copied, so they need no memory any more
        part = self.shards.part if self.shards else None
        try:
            header = slot.seal(layout, self.identity, step, part)
            seconds = time.thread_time() - started
            self._pair.prepare_next(layout.size)  # else training would wait for it, once
        except SharedMemoryError:
            if self.shards is not None:
                self.shards.skip()
            raise
        if self.shards is not None:
            seconds += self.shards.copy(header, slot.content[: header.size])
        return seconds

    def is_busy(self) -> bool:
        """Return whether a state is not complete yet; note what the last one took."""
        if self._pending is not None and self._pending.done():
            self._finish()
        return self._pending is not None

    def _finish(self) -> None:
        """Wait until the last state is complete."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        try:
            self.seconds = pending.result()
        except SharedMemoryError as error:
            self._give_up(error)

    def close(self) -> None:
        """Finish the last state, and stop the thread; the states stay."""
        self._finish()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self.shards is not None:
            self.shards.close()
        self._close_files()

    def _close_files(self) -> None:
        self.copies.unpin()
        if self._pair is not None:
            self._pair.close()
        self._pair = None
        if self._lock is not None:
            self._lock.close()
        self._folder = None

    def _give_up(self, error: SharedMemoryError) -> None:
        self.fault = str(error)
        logger.warning("the state isn't kept in memory any more: %s", error)
        self._close_files()
        if self.shards is None:  # with those of other ranks, the last ones may still be of use
            remove_states(self.identity)
