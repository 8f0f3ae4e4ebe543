"""Saves the run: periodically, at its best, at its end, and when a signal stops it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import CombinedLoader

from lockstep.callbacks.step import StepCallback, ends_epoch
from lockstep.checkpoints import reading as files
from lockstep.checkpoints.content import refuse_unreadable
from lockstep.checkpoints.finite_states import refuse_broken_state
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import UserError
from lockstep.metrics.callback import Metrics
from lockstep.metrics.mean import means_of
from lockstep.patches.lightning import count_logged_steps, validation_follows
from lockstep.ranks.ranks import from_rank_zero
from lockstep.run.resuming import align_batch_progress
from lockstep.run.run import Run
from lockstep.settings import check, check_choice, not_a_config

logger = logging.getLogger(__name__)


def nothing(_trainer: Trainer) -> Mapping[str, Any]:
    """Return what a checkpoint has in addition to the training state: nothing."""
    return {}


def _tell_repeated_samples(trainer: Trainer) -> None:
    """Warn, on rank 0, that data without a state doesn't continue in the middle of an epoch."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    loaders: Any = trainer.train_dataloader
    if not 0 < done < trainer.num_training_batches or not trainer.is_global_zero:
        return
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    stateless = [loader for loader in combined.flattened if not hasattr(loader, "load_state_dict")]
    if stateless:
        logger.warning(
            "training continues after %d batches of an epoch, but %s begins the epoch anew: some "
            "samples come twice, others don't come; lockstep.train_loader continues exactly",
            done,
            type(stateless[0]).__name__,
        )


def _will_log(trainer: Trainer) -> set[str]:
    """Return the metrics that the next row has."""
    if not any(isinstance(each, Metrics) for each in trainer.callbacks):  # type: ignore[attr-defined]
        return set()
    means = means_of(trainer.lightning_module)
    return {name for mean in means.values() for name in (mean.name, *mean.also)}


def _refuse_unreadable_states(trainer: Trainer, folder: Path) -> None:
    """Refuse schedulers and callbacks that no checkpoint can restore, before any step is lost."""
    schedulers = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
    callbacks = {each.state_key: each.state_dict() for each in trainer.callbacks}  # type: ignore[attr-defined]
    states = {"lr_schedulers": schedulers, "callbacks": callbacks}
    refuse_unreadable(states, f"checkpoints in {folder}")


def _write_whole_files(trainer: Trainer) -> None:
    """Let a Trainer write whole files with a SHA-256 where Lightning's usual way may be cut off."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


@not_a_config
@dataclass(eq=False, repr=False)
class Checkpoints(StepCallback, Checkpoint):
    """Keeps the newest checkpoints, and those with the best values of a metric.

    It saves after the last step, and after the validation of the steps that have one; after the
    last step of an epoch, when the next one begins. It needs no
    other part: any module with any optimizer is saved as it is, once all its numbers are finite. A
    file appears whole, with a SHA-256 that `Trainer.fit(ckpt_path=...)` verifies.

        >>> run = lockstep.Run.alone()
        >>> trainer = Trainer(callbacks=[lockstep.Checkpoints(run, every=100)], plugins=run.plugins)

    Args:
        run: whose checkpoints these are; or the folder where they are saved; None: this process's.
        every: optimizer steps between checkpoints; None: only at the end, and the best.
        keep_last: how many of the newest to keep.
        keep_best: how many of the best to keep, saved at most once in `every` steps.
        monitor: the logged metric that decides which are the best; not needed if none is kept.
        mode: whether the smallest value is the best, or the largest: `min` or `max`.
        background: copy the state to host memory and let a thread write it; only with a `Run`.
        copy_to: folder or fsspec URL that gets a copy of each checkpoint; only with a `Run`.
        content: returns what every checkpoint has in addition to the training state.
    """

    run: Run | Path | str | None = None
    every: int | None = 500
    keep_last: int = 1
    keep_best: int = 1
    monitor: str = "val/loss"
    mode: str = "min"
    background: bool = False
    copy_to: str | None = None
    content: Callable[[Trainer], Mapping[str, Any]] = nothing
    folder: Path = field(init=False)
    _run: Run | None = field(default=None, init=False)  # None: only the folder is known
    urgent: bool = field(default=False, init=False)  # if set, save after the next validation
    # Step of a kept checkpoint -> its value of the metric.
    values: dict[int, float] = field(default_factory=dict, init=False)
    last_validated: int = field(default=0, init=False)  # step of the last save with a value
    saves: list[Path] = field(default_factory=list, init=False)  # of this process
    newest_value: float = field(default=math.nan, init=False)  # of the metric, for the summary
    # Of later steps than the one that training starts at here.
    _others: list[Path] = field(default_factory=list, init=False)
    _measured_at: int = field(default=0, init=False)  # step of `newest_value`
    _last_saved: int = field(default=0, init=False)  # step; at first, where training starts
    _logged: float | None = field(default=None, init=False)  # the metric when training stopped
    _waits: bool = field(default=False, init=False)  # whether a save is due

    def __post_init__(self) -> None:
        if isinstance(self.run, Path | str):
            self.folder = Path(self.run)
            of_run = [name for name in ("background", "copy_to") if getattr(self, name)]
            check("run", self.run, not of_run, f"must be a Run for {' and '.join(of_run)}")
        else:
            self._run = self.run or Run.current().untaken()
            self.folder = self._run.directory.checkpoints
            self._run.take(self)
        check("every", self.every, self.every is None or self.every >= 1, "must be at least 1")
        check("keep_last", self.keep_last, self.keep_last >= 1, "must be at least 1")
        check("keep_best", self.keep_best, self.keep_best >= 0, "must be at least 0")
        check_choice("mode", self.mode, ("min", "max"))

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse a disk that is too small, and checkpoints that don't fit the run."""
        super().setup(trainer, pl_module, stage)
        if self.background and getattr(trainer.strategy, "saves_parts", False):
            raise UserError(
                "strategy.save_parts=true and checkpoint.background=true conflict; set one to false"
            )
        if self._run is None:
            _write_whole_files(trainer)
        elif stage == "fit":
            self._run.expect(trainer, pl_module)

    @property
    def _parts(self) -> list[Any]:
        """What a run's checkpoints have besides, as callbacks: hashes, and what has computed."""
        if self._run is None:
            return []
        return [self._run.hashes, self._run.arithmetic]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note where a new or resumed run starts."""
        for part in self._parts:
            part.on_train_start(trainer, pl_module)
        super().on_train_start(trainer, pl_module)
        _tell_repeated_samples(trainer)
        _refuse_unreadable_states(trainer, self.folder)
        self._last_saved = trainer.global_step
        restored = trainer.callback_metrics.get(self.monitor, math.nan)  # by `ValidateEvery`
        self.newest_value = float(restored)
        present = files.checkpoints_in(self.folder)
        self._others = [path for path in present if files.step_of(path) > trainer.global_step]

    def validates(self, trainer: Trainer) -> bool:
        """Return whether a validation follows the optimizer step that just ended."""
        is_last = trainer.global_step == trainer.max_steps  # `on_step_end` stops training then
        return trainer.enable_validation and (is_last or validation_follows(trainer))

    def is_unfinished(self, trainer: Trainer) -> bool:
        """Return whether the step that just ended is followed by a validation, or ends an epoch.

        A state that is saved now would mark them as done. They end before the next step, or before
        the run does.
        """
        return self.validates(trainer) or ends_epoch(trainer)

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether optimizer step `step` is saved regardless of its value."""
        return step == last_step or (self.every is not None and step % self.every == 0)

    def is_best(self, step: int, value: float) -> bool:
        """Return whether the metric's value after `step` decides to save.

        Early in a run, each validation is the best so far; saving each could cost more than a
        tenth of the time. A value that is not a number never is the best.
        """
        best = sorted([*self.values.values(), value], key=self._rank)[: self.keep_best]
        is_apart = step - self.last_validated >= (self.every or 0)
        return not math.isnan(value) and value in best and is_apart

    def _rank(self, value: float) -> float:
        return -value if self.mode == "max" else value

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Save if due, once the step is finished."""
        if step == trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates a last time, at any step,
            trainer.fit_loop.min_epochs = 0  # but not before these, though the run ends here
            trainer.fit_loop.epoch_loop.min_steps = None
        is_due = self.is_due(step, trainer.max_steps)
        if is_due or trainer.should_stop:
            self._waits = not self.validates(trainer)
            self._save_if_finished(trainer)

    def _save_if_finished(self, trainer: Trainer) -> None:
        """Save what waits for it, unless the epoch ends: then, when the next one begins."""
        if self._waits and not ends_epoch(trainer):
            self.save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_batch: Any) -> None:
        """Let what a resumed run logs have the same steps."""
        if trainer.fit_loop.restarting and pl_module.automatic_optimization:
            count_logged_steps(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_batch: Any) -> None:
        """Let a resumed epoch end like any other.

        Lightning updates no schedulers at the end of one, because it hasn't all of its metrics.
        """
        if trainer.fit_loop.restarting:
            trainer.fit_loop.on_iteration_done()  # as Lightning does only at the end of the epoch
        super().on_train_batch_end(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the state in which the last epoch has ended, if that is due."""
        if self._waits or self.urgent:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save if due, among the best so far, or the last because a callback stops the run."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        step = trainer.global_step
        self.newest_value = value = self._monitored(trainer)
        self._measured_at = step
        is_due = self.is_due(step, trainer.max_steps)
        if self.urgent or trainer.should_stop or is_due or self.is_best(step, value):
            if not math.isnan(value):
                self.values[step] = value
            self.last_validated = step
            self._waits = True
            self._save_if_finished(trainer)

    def _monitored(self, trainer: Trainer) -> float:
        """Return the metric's value on rank 0, by which all ranks decide the same.

        Raises:
            UserError: nobody has logged it, and the best are kept.
        """
        value: Any = trainer.callback_metrics.get(self.monitor)
        if value is None and self.monitor in _will_log(trainer):
            value = self._logged  # until the first row; a metric that nobody logs is none
        elif value is None and self.keep_best > 0:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise UserError(
                f"monitor={self.monitor} decides which checkpoints are the best, but only {logged} "
                "is logged; monitor one of these, log it with `self.log`, or set keep_best=0"
            )
        return float(from_rank_zero(math.nan if value is None else float(value)))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the end of a run that its epochs or another callback ended between two saves."""
        if trainer.global_step > self._last_saved:
            if trainer.global_step == self._measured_at and not math.isnan(self.newest_value):
                self.values[trainer.global_step] = self.newest_value
            self.save(trainer)

    def save(self, trainer: Trainer) -> Path:
        """Save, on every rank, the state after the last optimizer step, or raise a `RunError`.

        A state that is not finite is never saved: the newest good checkpoint stays the newest.
        Lightning's `fast_dev_run` saves nothing, as with its own callback.
        """
        path = files.checkpoint_path(self.folder, trainer.global_step)
        self._waits = False
        if getattr(trainer, "fast_dev_run", False):  # its class doesn't declare it
            self.values.clear()
            return path
        refuse_broken_state(trainer, self.newest)
        if not self.saves:
            self._make_room(trainer)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            self._prune(trainer, path)
        self.saves.append(path)
        self._last_saved = trainer.global_step
        return path

    def newest(self) -> Path | None:
        """Return the newest checkpoint of this model that this rank sees; None: there is none."""
        if self.saves:
            return self.saves[-1]
        present = [path for path in self._present() or [] if path not in self._others]
        return present[-1] if present else None

    def _make_room(self, trainer: Trainer) -> None:
        """Move checkpoints of another model away, before the first save."""
        if trainer.is_global_zero:
            for path in self._others:
                files.set_aside(path)
        trainer.strategy.barrier()  # ranks may write parts of checkpoints with the same names

    def _prune(self, trainer: Trainer, new: Path) -> None:
        """Delete checkpoints neither among the newest nor the best, once `new` is saved."""
        present = sorted({*files.checkpoints_in(self.folder), new}, key=files.step_of)
        newest = present[-self.keep_last :]
        best = self._best_steps()[: self.keep_best]
        for path in present:
            if path not in (new, *newest) and files.step_of(path) not in best:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                self.values.pop(files.step_of(path), None)

    def _best_steps(self) -> list[int]:
        """Return the steps of checkpoints with a value, the best first."""
        return sorted(self.values, key=lambda step: self._rank(self.values[step]))

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, by the name that Lightning's `ckpt_path="best"` reads; or empty."""
        best = self._best_steps()[:1]
        return str(files.checkpoint_path(self.folder, best[0])) if best else ""

    def in_summary(self, _step: int) -> dict[str, Any]:
        """Return `summary.json`'s entries on checkpoints."""
        best_checkpoint = best_value = None
        if self.values:
            best_checkpoint = self.best_model_path
            best_value = self.values[self._best_steps()[0]]
        newest = None if math.isnan(self.newest_value) else self.newest_value
        present = files.checkpoints_in(self.folder)
        last_checkpoint = str(present[-1]) if present else None
        weights = {} if self._run is None else self._run.hashes.in_summary(_step)
        return {
            **weights,
            "monitor": self.monitor,
            "monitored_value": newest,
            "best_value": best_value,
            "best_checkpoint": best_checkpoint,
            "last_checkpoint": last_checkpoint,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Add what every checkpoint has in addition to the training state."""
        checkpoint["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        # After a resume, a validation may come before the next row.
        value = trainer.callback_metrics.get(self.monitor, self._logged)
        checkpoint["callbacks"][self.state_key]["logged"] = None if value is None else float(value)
        if self._run is not None:
            checkpoint["config"] = self._run.config
        for part in self._parts:
            part.on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint.update(self.content(trainer))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Continue after whole steps of this run's own accumulation, and at the saved sample."""
        if not self.trains:
            return
        for part in self._parts:
            part.on_load_checkpoint(trainer, pl_module, checkpoint)
        align_batch_progress(checkpoint, trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides which validation is among the best, and which saves."""
        return {
            "losses": dict(self.values),  # the name that readers know
            "last_validated": self.last_validated,
            "monitor": self.monitor,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of checkpoints that still exist: rank 0 checks."""
        if not self.trains:
            return
        present = from_rank_zero(self._present())
        values = state_dict["losses"]
        self.last_validated = state_dict["last_validated"]
        self._logged = state_dict.get("logged")
        if state_dict["monitor"] != self.monitor:
            values = {}  # of another metric
            self._logged = None
        if present is not None:
            steps = [*map(files.step_of, present)]
            values = {step: value for step, value in values.items() if step in steps}
        self.values = dict(values)

    def _present(self) -> list[Path] | None:
        """Return the present checkpoints; None if a state in memory is all there is."""
        try:
            return files.checkpoints_in(self.folder)
        except UserError:  # the next save fails, if the folder stays unreadable
            return None
