"""Saves the run: periodically, at its best, at its end, and when a signal stops it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning import Trainer
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from lockstep_gpt.config import Config
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.distributed.rank_states import is_of_rank, with_own_shards
from lockstep_gpt.distributed.ranks import from_rank_zero
from lockstep_gpt.errors import UserError
from lockstep_gpt.run import checkpoint as files
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.run.callbacks.weight_hashes import WeightHashes
from lockstep_gpt.run.checkpoint_content import joined
from lockstep_gpt.run.checkpoint_sums import VerifiedCheckpoint
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.memory.files import KeptState
from lockstep_gpt.run.memory.states import read_state
from lockstep_gpt.run.resuming import rescale_batch_progress


class Save(NamedTuple):
    """How long training waited for a checkpoint, on the clock."""

    path: Path
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """Return how long."""
        return self.ended_at - self.started_at


@dataclass(eq=False, repr=False)
class Checkpoints(StepCallback, Checkpoint):
    """Keeps the newest checkpoints and those with the lowest validation losses."""

    folder: Path  # where they are saved
    config: Config  # when to save and to validate, and how many to keep
    content: dict[str, Any]  # saved in every checkpoint, next to the training state
    total_steps: int  # optimizer steps of the run
    urgent: bool = field(default=False, init=False)  # if set, save after the next validation
    # Step of a kept checkpoint -> its validation loss.
    losses: dict[int, float] = field(default_factory=dict, init=False)
    last_validated: int = field(default=0, init=False)  # step of the last save with a loss
    saves: list[Save] = field(default_factory=list, init=False)  # of this process
    # Of later steps than the first one here: of a model that the run left with `resume_force`.
    _others: list[Path] = field(default_factory=list, init=False)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note where a new or resumed run starts."""
        super().on_train_start(trainer, pl_module)
        present = files.checkpoints_in(self.folder)
        self._others = [path for path in present if files.step_of(path) > trainer.global_step]

    def validates(self, trainer: Trainer) -> bool:
        """Return whether a validation follows the optimizer step that just ended."""
        last = trainer.should_stop or trainer.global_step == self.total_steps
        return trainer.enable_validation and (
            last or trainer.global_step % self.config.val_every == 0
        )

    def is_due(self, step: int) -> bool:
        """Return whether optimizer step `step` is saved regardless of its loss."""
        every = self.config.checkpoint.every
        return step == self.total_steps or (every is not None and step % every == 0)

    def is_best(self, step: int, loss: float) -> bool:
        """Return whether the validation loss after `step` decides to save.

        Early in a run, each validation is the best so far; saving each could cost more than a
        tenth of the time.
        """
        best = sorted([*self.losses.values(), loss])[: self.config.checkpoint.keep_best]
        return loss in best and step - self.last_validated >= (self.config.checkpoint.every or 0)

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Save now only if no validation follows; else the saved state would mark it as done."""
        if step == self.total_steps:
            trainer.should_stop = True  # Lightning then validates a last time, at any step
        if (self.is_due(step) or trainer.should_stop) and not self.validates(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save if due, among the best so far, or the last because a callback stops the run."""
        step = trainer.global_step
        loss = float(trainer.callback_metrics["val/loss"])
        if self.urgent or trainer.should_stop or self.is_due(step) or self.is_best(step, loss):
            self.losses[step] = loss
            self.last_validated = step
            self.save(trainer)

    def save(self, trainer: Trainer) -> Path:
        """Save, on every rank, the state after the last optimizer step, or raise a `RunError`."""
        path = files.checkpoint_path(self.folder, trainer.global_step)
        if not self.saves:
            self._make_room(trainer)
        started_at = time.perf_counter()  # the device has finished the step: its count was read
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            self._prune(trainer, path)
        self.saves.append(Save(path, started_at, time.perf_counter()))
        return path

    def _make_room(self, trainer: Trainer) -> None:
        """Move checkpoints of another model away, before the first save."""
        if trainer.is_global_zero:
            for path in self._others:
                files.set_aside(path)
        trainer.strategy.barrier()  # ranks may write parts of checkpoints with the same names

    def _prune(self, trainer: Trainer, new: Path) -> None:
        """Delete checkpoints neither among the newest nor the best, once `new` is saved."""
        present = sorted({*files.checkpoints_in(self.folder), new}, key=files.step_of)
        newest = present[-self.config.checkpoint.keep_last :]
        best = self._best_steps()[: self.config.checkpoint.keep_best]
        for path in present:
            if path not in (new, *newest) and files.step_of(path) not in best:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                self.losses.pop(files.step_of(path), None)

    def _best_steps(self) -> list[int]:
        """Return the steps of checkpoints with a loss, the best first."""
        return sorted(self.losses, key=self.losses.__getitem__)

    def in_summary(self, _step: int) -> dict[str, Any]:
        """Return `summary.json`'s entries on checkpoints."""
        best_checkpoint = None
        if self.losses:
            best_checkpoint = str(files.checkpoint_path(self.folder, self._best_steps()[0]))
        present = files.checkpoints_in(self.folder)
        last_checkpoint = str(present[-1]) if present else None
        return {"best_checkpoint": best_checkpoint, "last_checkpoint": last_checkpoint}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Add the configuration, the tokenizer, and the counts of samples and tokens."""
        samples = samples_seen(trainer, self.config)
        tokens = samples * self.config.model.block_size
        checkpoint.update(self.content, samples=samples, tokens=tokens)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Continue at the saved sample, with this run's own accumulation."""
        data: Any = getattr(trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            data.resume_at(checkpoint["global_step"], checkpoint["samples"])
            rescale_batch_progress(checkpoint, trainer.accumulate_grad_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides which validation is among the best, and which saves."""
        return {"losses": dict(self.losses), "last_validated": self.last_validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the losses of checkpoints that still exist: rank 0 checks."""
        present = from_rank_zero(self._present_steps())
        losses = state_dict["losses"]
        if present is not None:
            losses = {step: loss for step, loss in losses.items() if step in present}
        self.losses = dict(losses)
        # Earlier versions saved only the losses.
        self.last_validated = state_dict.get("last_validated", max(losses, default=0))

    def _present_steps(self) -> list[int] | None:
        """Return the steps of present checkpoints; None if a state in memory is all there is."""
        try:
            return [*map(files.step_of, files.checkpoints_in(self.folder))]
        except UserError:  # the next save fails, if the folder stays unreadable
            return None


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
        self.written_at: dict[Path, float] = {}  # the clock when each checkpoint was complete
        # What the ranks resume from, which one rank of each machine has read and verified.
        self.verified: VerifiedCheckpoint | KeptState | None = None
        # Refuses the content of a checkpoint, whose place it is told, that doesn't fit the run.
        self.refuse_unfit: Callable[[str, dict[str, Any]], None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint and its SHA-256; `storage_options` has those of its other files."""
        self._save(checkpoint, Path(path), storage_options)

    def _save(self, checkpoint: dict[str, Any], path: Path, others: dict[str, str] | None) -> None:
        self._write(checkpoint, path, others)
        self.written_at[path] = time.perf_counter()

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
        return files.read_verified(verified, map_location, whole)

    def wait(self) -> None:
        """Do nothing: everything is already written."""


def samples_seen(trainer: Any, config: Config) -> int:
    """Return how many samples all ranks together have seen."""
    data = trainer.datamodule
    if isinstance(data, TokenDataModule):
        return data.samples_seen(trainer.global_step)
    size = config.batch.global_size
    assert size is not None, "decided before there are ranks"
    return int(trainer.global_step * size)
