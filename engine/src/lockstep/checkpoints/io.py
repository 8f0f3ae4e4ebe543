"""Writes checkpoints, whole or not at all, and reads them once they are verified."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lockstep.callbacks.weight_hashes import WeightHashes
from lockstep.checkpoints import reading as files
from lockstep.checkpoints.content import (
    WEIGHTS,
    joined,
    plain,
    refuse_unreadable,
)
from lockstep.checkpoints.sums import VerifiedCheckpoint
from lockstep.memory.files import KeptState
from lockstep.memory.states import read_state
from lockstep.run.directory import RunDirectory
from lockstep.strategies.rank_states import is_of_rank, with_own_shards

logger = logging.getLogger(__name__)


class AtomicCheckpointIO(CheckpointIO):
    """Writes complete checkpoints or none, on rank 0; Lightning's own can be cut off.

    Args:
        directory: the run, which remembers that it has saved checkpoints; None: there is none.
        hashes: adds the hash of the weights to each checkpoint; None: checkpoints have none.
    """

    def __init__(
        self, directory: RunDirectory | None = None, hashes: WeightHashes | None = None
    ) -> None:
        self.directory = directory
        self.hashes = hashes
        self._has_told = False
        # What the ranks resume from, which one rank of each machine has read and verified.
        self.verified: VerifiedCheckpoint | KeptState | None = None
        # Refuses the content of a checkpoint, whose place it is told, that doesn't fit the run.
        self.refuse_unfit: Callable[[str, dict[str, Any]], None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint and its SHA-256; `storage_options` has those of its other files."""
        self._write(self._plain(checkpoint, path), Path(path), storage_options)

    def _plain(self, checkpoint: dict[str, Any], path: Any) -> dict[str, Any]:
        """Return what can be read again; say once what can't."""
        content, left_out = plain(checkpoint)
        if self.refuse_unfit is not None:  # a run resumes from it
            refuse_unreadable(content, f"checkpoint {path}")
        if left_out and not self._has_told:
            self._has_told = True
            line = "checkpoints don't have %s: give these arguments to load_from_checkpoint"
            logger.warning(line, ", ".join(left_out))
        return content

    def _write(self, checkpoint: dict[str, Any], path: Path, others: dict[str, str] | None) -> None:
        if self.hashes is not None:
            checkpoint = self.hashes.added_to(checkpoint)
        files.write_checkpoint(checkpoint, path, others)
        if self.directory is not None and path.parent == self.directory.checkpoints:
            self.directory.note_save()

    def save_part(self, part: dict[str, Any], path: Path) -> str:
        """Write one rank's part of a checkpoint; return its SHA-256, for the checksum file."""
        return files.write_checkpoint(part, path, checksum_file=False)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint."""
        files.remove_checkpoint(Path(path))

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = "cpu",
        weights_only: bool | None = True,
        whole: bool = True,
    ) -> dict[str, Any]:
        """Return the checkpoint at `path` if it matches its SHA-256, or is the verified one.

        If not `whole`, tensors in parts are `SavedShards`.
        """
        assert weights_only is not False, "a checkpoint is never unpickled"
        content = self._read(Path(path), map_location, whole)
        if self.refuse_unfit is not None:
            seen = with_own_shards(content) if is_of_rank(content) else content
            self.refuse_unfit(f"checkpoint {path}", seen)
        return content

    def _read(self, path: Path, map_location: Any, whole: bool) -> dict[str, Any]:
        verified = self.verified
        if isinstance(verified, KeptState) and verified.path == path:
            content = read_state(verified)
            return joined(content) if whole else content
        if not isinstance(verified, VerifiedCheckpoint) or verified.path != path:
            verified = files.verify_named(path)
        return files.read_verified(verified, map_location, whole, WEIGHTS)

    def wait(self) -> None:
        """Do nothing: everything is already written."""

    @property
    def is_writing(self) -> bool:
        """Whether something is being written in the background."""
        return False
