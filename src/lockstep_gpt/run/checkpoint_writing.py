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

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.ranks import Ranks
from lockstep_gpt.errors import UserError
from lockstep_gpt.run import checkpoint_copies
from lockstep_gpt.run.callbacks.checkpoints import AtomicCheckpointIO
from lockstep_gpt.run.directory import RunDirectory

logger = logging.getLogger(__name__)


def checkpoint_io(directory: RunDirectory, config: Config) -> AtomicCheckpointIO:
    """Return what writes a run's checkpoints: now or in the background, once or twice.

    Raises:
        UserError: another run's copies are where this run's would go.
    """
    background = config.checkpoint.background
    url = checkpoint_copies.copies_of(directory, config)
    if not background and not url:
        return AtomicCheckpointIO()
    disk = CopyingCheckpointIO(background, url, partial(checkpoint_copies.claim, directory, config))
    if url and Ranks.from_environment().rank == 0:
        try:
            disk.claim()
        except UserError:
            raise
        except Exception as error:  # as below; it may work for the first copy
            logger.warning("%s cannot be reached: %s", url, error)
    return disk


class CopyingCheckpointIO(AtomicCheckpointIO):
    """Writes checkpoints in the background, or to two locations.

    Lightning's `AsyncCheckpointIO` writes tensors that training still changes, and drops errors.

    Args:
        background: copy the state to host memory and let a thread write it.
        copy_to: folder or fsspec URL that gets a copy of each checkpoint.
        claim: marks it as this run's before the first copy, or raises.
    """

    def __init__(
        self,
        background: bool = False,
        copy_to: str | None = None,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        self.copy_to, self._claim, self._is_ours = copy_to, claim, False
        self._writer = ThreadPoolExecutor(1) if background else None  # one: in the order of calls
        self._pending: list[Future[None]] = []
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
        if self._writer is not None:
            checkpoint = self._snapshot(checkpoint)
        self._do(self._write, checkpoint, Path(path), storage_options)

    def _do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run `action` now, or in the background after all earlier actions."""
        if self._writer is None:
            action(*arguments)
        else:
            self._pending.append(self._writer.submit(action, *arguments))

    def _write(self, checkpoint: dict[str, Any], path: Path, others: dict[str, str] | None) -> None:
        self._succeeded = False
        super().save_checkpoint(checkpoint, path, others)
        self._succeeded = True
        if self.copy_to:
            self._elsewhere(
                f"no copy of {path.name}", lambda url: checkpoint_copies.copy_out(path, url)
            )

    def _elsewhere(self, fault: str, action: Callable[[str], None]) -> None:
        """Run `action` on the copies; a failure there doesn't end the run."""
        assert self.copy_to is not None
        try:
            self.claim()
            action(self.copy_to)
        except Exception as error:  # any error of a remote file system
            logger.warning("%s in %s: %s", fault, self.copy_to, error)

    def claim(self) -> None:
        """Mark the location of the copies as this run's, once, or raise."""
        if not self._is_ours:
            self._claim()
        self._is_ours = True

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint after the one saved before this call, unless saving that failed."""
        self._do(self._remove, Path(path))

    def _remove(self, path: Path) -> None:
        if not self._succeeded:
            return
        super().remove_checkpoint(path)
        if self.copy_to:
            fault = f"the copy of {path.name} stays"
            self._elsewhere(fault, lambda url: checkpoint_copies.remove_copy(path.name, url))

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            RunError: something couldn't be written.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def teardown(self) -> None:
        """Finish all files before the process ends."""
        self.wait()

    def _snapshot(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        copy: dict[str, Any] = self._copied(checkpoint, "")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def _copied(self, value: Any, place: str) -> Any:
        """Copy nested containers; tensors go into a buffer for each position."""
        if isinstance(value, dict):
            return {name: self._copied(each, f"{place}.{name}") for name, each in value.items()}
        if isinstance(value, list | tuple):
            parts = (self._copied(each, f"{place}.{index}") for index, each in enumerate(value))
            return type(value)(parts)
        if not isinstance(value, Tensor):
            return value
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self._buffers[place] = buffer
        return buffer.copy_(value, non_blocking=True)
