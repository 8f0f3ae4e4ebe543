"""Writes checkpoints in the background, and to a second location."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.callbacks.weight_hashes import WeightHashes
from lockstep.checkpoints import copies as checkpoint_copies
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import UserError
from lockstep.ranks.ranks import Ranks
from lockstep.run.directory import RunDirectory

logger = logging.getLogger(__name__)


def checkpoint_io(
    directory: RunDirectory,
    hashes: WeightHashes | None = None,
    *,
    background: bool = False,
    copy_to: str | None = None,
    continues: bool = False,
) -> AtomicCheckpointIO:
    """Return what writes a run's checkpoints: now or in the background, once or twice.

    Args:
        directory: the run.
        hashes: adds the hash of the weights to each checkpoint; None: checkpoints have none.
        background: copy the state to host memory and let a thread write it.
        copy_to: folder or fsspec URL of this run alone, which gets a copy of each checkpoint:
            `copies_of` names one in a folder for many runs.
        continues: whether the run may have copies that its directory has forgotten.

    Raises:
        UserError: another run's copies are where this run's would go.
    """
    if not background and copy_to is None:
        return AtomicCheckpointIO(directory, hashes)
    claim = None
    if copy_to is not None:
        claim = partial(checkpoint_copies.claim, directory, copy_to, continues=continues)
    io = CopyingCheckpointIO(background, copy_to, claim, directory, hashes)
    if copy_to is not None and Ranks.from_environment().rank == 0:
        try:
            io.claim()
        except UserError:
            raise
        except Exception as error:  # of a remote file system; the first copy claims it again
            logger.warning("%s cannot be reached: %s", copy_to, error)
    return io


class CopyingCheckpointIO(AtomicCheckpointIO):
    """Writes checkpoints in the background, or to two locations.

    Lightning's `AsyncCheckpointIO` writes tensors that training still changes, and drops errors.

    Args:
        background: copy the state to host memory and let a thread write it.
        copy_to: folder or fsspec URL that gets a copy of each checkpoint.
        claim: is called before the first copy to mark `copy_to` as this run's, or raises.
        directory: the run, which remembers that it has saved checkpoints; None: there is none.
        hashes: adds the hash of the weights to each checkpoint; None: checkpoints have none.
    """

    def __init__(
        self,
        background: bool = False,
        copy_to: str | None = None,
        claim: Callable[[], None] | None = None,
        directory: RunDirectory | None = None,
        hashes: WeightHashes | None = None,
    ) -> None:
        super().__init__(directory, hashes)
        self.copy_to = copy_to
        self._claim = claim  # None once `copy_to` is this run's
        self._writer = ThreadPoolExecutor(1) if background else None  # one: in the order of calls
        self._pending: list[Future[None]] = []
        self._newest: Future[None] | None = None
        self._succeeded = True  # whether the last save succeeded
        self._buffers: dict[str, Tensor] = {}  # reused: new memory costs more than copying

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`, and its SHA-256 next to it.

        Args:
            checkpoint: plain containers and tensors.
            path: the file.
            storage_options: name -> SHA-256 of its other files, which are next to it already.

        Raises:
            RunError: this one, or in the background the last one, can't be written.
        """
        self.wait()
        checkpoint = self._plain(checkpoint, path)
        if self._writer is not None:
            checkpoint = self._snapshot(checkpoint)
        self._run_in_order(self._write, checkpoint, Path(path), storage_options)

    def _run_in_order(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run `action` now, or in the background after all earlier actions."""
        if self._writer is None:
            action(*arguments)
        else:
            self._newest = self._writer.submit(action, *arguments)
            self._pending.append(self._newest)

    def _write(self, checkpoint: dict[str, Any], path: Path, others: dict[str, str] | None) -> None:
        self._succeeded = False
        super()._write(checkpoint, path, others)
        self._succeeded = True
        if self.copy_to:
            fault = f"no copy of {path.name}"
            self._update_copies(fault, partial(checkpoint_copies.copy_out, path))

    def _update_copies(self, fault: str, action: Callable[[str], None]) -> None:
        """Run `action` on the location of the copies; a failure there doesn't end the run."""
        assert self.copy_to is not None
        try:
            self.claim()
            action(self.copy_to)
        except Exception as error:  # any error of a remote file system
            logger.warning("%s in %s: %s", fault, self.copy_to, error)

    def claim(self) -> None:
        """Mark the location of the copies as this run's, once, or raise."""
        if self._claim is not None:
            self._claim()
        self._claim = None

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint after the one saved before this call, unless saving that failed."""
        self._run_in_order(self._remove, Path(path))

    def _remove(self, path: Path) -> None:
        if not self._succeeded:
            return
        super().remove_checkpoint(path)
        if self.copy_to:
            fault = f"the copy of {path.name} stays"
            self._update_copies(fault, partial(checkpoint_copies.remove_copy, path.name))

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            RunError: something couldn't be written.
        """
        pending = self._pending
        self._pending = []  # an error is raised once
        for action in pending:
            action.result()

    @property
    def is_writing(self) -> bool:
        """Whether something is being written in the background."""
        return self._newest is not None and not self._newest.done()

    def teardown(self) -> None:
        """Finish all files before the process ends."""
        self.wait()

    def _snapshot(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        copy: dict[str, Any] = self._copy(checkpoint, "")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def _copy(self, value: Any, position: str) -> Any:
        """Copy nested containers; tensors go into a buffer for each position."""
        if isinstance(value, dict):
            return {name: self._copy(item, f"{position}.{name}") for name, item in value.items()}
        if isinstance(value, list | tuple):
            copies = (self._copy(item, f"{position}.{index}") for index, item in enumerate(value))
            return type(value)(copies)
        if not isinstance(value, Tensor):
            return value
        buffer = self._buffers.get(position)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self._buffers[position] = buffer
        return buffer.copy_(value, non_blocking=True)
