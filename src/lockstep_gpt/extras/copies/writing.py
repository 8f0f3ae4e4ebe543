"""Writes checkpoints in the background, and to a second place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep_gpt.config import Config
from lockstep_gpt.extras.copies import remote
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training.callbacks.checkpoints import AtomicCheckpointIO

logger = logging.getLogger(__name__)


def checkpoint_io(directory: RunDirectory, config: Config) -> CopyingCheckpointIO | None:
    """Return what writes a run's checkpoints in the background or twice, if anything shall."""
    background, url = config.checkpoint.background, remote.copies_of(directory, config)
    return CopyingCheckpointIO(background, url) if background or url else None


class CopyingCheckpointIO(AtomicCheckpointIO):
    """Writes checkpoints in the background or to two places, as `checkpoint.background` says.

    Lightning's `AsyncCheckpointIO` writes what training goes on to change, and forgets a failure.

    Args:
        background: copy the state into memory of the host and let a thread write it.
        copy_to: folder or fsspec URL that gets a copy of each.
    """

    def __init__(self, background: bool = False, copy_to: str | None = None) -> None:
        self.copy_to = copy_to
        self._writer = ThreadPoolExecutor(1) if background else None  # one: in the order of calls
        self._pending: list[Future[None]] = []
        self._stands = True  # what was saved last
        self._buffers: dict[str, Tensor] = {}  # kept: new memory costs more than the copying

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`, its SHA-256 beside it.

        Args:
            checkpoint: plain containers and tensors.
            path: where to.
            storage_options: name -> SHA-256 of its other files, which stand beside it already.

        Raises:
            RunError: this one, or in the background the last one, cannot be written.
        """
        self.wait()
        if self._writer is not None:
            checkpoint = self._snapshot(checkpoint)
        self._do(self._write, checkpoint, Path(path), storage_options)

    def _do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Act now, or in the background after all that was asked for before."""
        if self._writer is None:
            action(*arguments)
        else:
            self._pending.append(self._writer.submit(action, *arguments))

    def _write(self, checkpoint: dict[str, Any], path: Path, others: dict[str, str] | None) -> None:
        self._stands = False
        super().save_checkpoint(checkpoint, path, others)
        self._stands = True
        if self.copy_to:
            try:
                remote.copy_out(path, self.copy_to)
            except Exception as error:  # whatever a remote file system raises
                logger.warning("no copy of %s in %s: %s", path.name, self.copy_to, error)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint, once the one that was saved before this call stands."""
        self._do(self._remove, Path(path))

    def _remove(self, path: Path) -> None:
        if not self._stands:
            return
        super().remove_checkpoint(path)
        if self.copy_to:
            remote.remove_copy(path.name, self.copy_to)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            RunError: something could not be.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def teardown(self) -> None:
        """Let no file be cut off by the end of the process."""
        self.wait()

    def _snapshot(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        copy: dict[str, Any] = self._copied(checkpoint, "")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def _copied(self, value: Any, place: str) -> Any:
        """Copy nested containers, tensors into the buffers of their places."""
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
