"""Records some steps: each rank's gradients, their average, and the update that followed."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.callbacks.counted_targets import CountTargets
from lockstep.callbacks.step import StepCallback, updates_after_batch
from lockstep.errors import UserError
from lockstep.loggers.step_rows import log_row
from lockstep.loggers.tracking import tracked_runs
from lockstep.metrics.callback import tokens_of
from lockstep.metrics.file import MetricsFile
from lockstep.pages.noise import UNMEASURED, NoiseScale, advice
from lockstep.pages.panel import panel_page
from lockstep.pages.recording import (
    LocalStep,
    MicroBatchNorms,
    Probe,
    Step,
    average_like_ddp,
    from_all_ranks,
)
from lockstep.pages.recordings import describe, write_recording
from lockstep.processes import typed
from lockstep.settings import check_number, check_whole
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.exact_sums import AddsGradients

logger = logging.getLogger(__name__)

NOISE_SCALE = "sync/noise_scale"


class SyncPanel(StepCallback):
    """Delays DDP's all-reduce at recorded steps, reads each rank's gradients, then runs it.

    Other steps don't change: the hooks only compare two numbers. The weights of a run are the
    same with and without this callback. Recorded steps don't overlap the all-reduce with the
    backward pass and need memory for one more copy of the gradients.

    Args:
        every: record step 1 and each multiple of this number.
        values: how many values of each parameter to keep.
        samples: how many samples of each rank to keep.
        sample_tokens: how many tokens of a sample to keep, or numbers of its first tensor.
        ranks: how many ranks to keep values for; norms and averages use all ranks.
        files: about how many recorded steps to write at most; the noise scale uses them all.
        smoothing: fraction of the noise scale's averages that is kept at each measurement.
    """

    def __init__(
        self,
        every: int = 50,
        values: int = 4,
        samples: int = 2,
        sample_tokens: int = 64,
        ranks: int = 8,
        files: int = 40,
        smoothing: float = 0.95,
    ) -> None:
        for name, value, least in (
            ("every", every, 1),
            ("values", values, 1),
            ("samples", samples, 0),
            ("ranks", ranks, 1),
            ("files", files, 1),
        ):
            check_whole(name, value, at_least=least)
        check_number("smoothing", smoothing, at_least=0, below=1)
        self.every = every
        self.values = values
        self.files = files
        self.samples = samples
        self.sample_tokens = sample_tokens
        self.ranks = ranks
        self.noise = NoiseScale(smoothing)
        self._advice = UNMEASURED
        self._local_step: LocalStep | None = None  # while a step is being recorded
        self._parts: MicroBatchNorms | None = None
        self._counts: CountTargets | None = None  # if the counts of targets differ

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Reject settings under which the panel can't show or repeat the average.

        Raises:
            UserError: the strategy isn't DDP or one device, uses exact sums, or uses PowerSGD.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
            kind = type(strategy).__name__
            raise UserError(f"callbacks=sync_panel records under ddp, not under {kind}; remove it")
        if isinstance(strategy, AddsGradients) and strategy.exact_threads is not None:
            raise UserError(
                "callbacks=sync_panel averages in the order of ddp, but batch.exact_micro_size "
                "adds in another; remove one of them"
            )
        if isinstance(strategy, DDPStrategy) and strategy.loses_error:
            raise UserError(
                "callbacks=sync_panel records averages, but strategy.comm_hook=powersgd makes "
                "approximations that depend on every step before; remove one of them"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Choose the values to read; find the run directory, where metrics.csv is."""
        super().on_train_start(trainer, pl_module)
        metrics = [logger for logger in trainer.loggers if isinstance(logger, MetricsFile)]
        if not metrics:
            raise UserError(
                "callbacks=sync_panel writes next to metrics.csv, which this Trainer hasn't; add "
                "logger=run.loggers() to it"
            )
        self._run = metrics[0].path.parent
        self._tokens_per_sample = tokens_of(trainer) or 0
        # Makes text of the samples; without it, they are shown as numbers.
        self._tokenizer: Any = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        self._probe = Probe(pl_module, self.values)
        self._ddp: Any = trainer.strategy.model
        if not isinstance(self._ddp, DistributedDataParallel):
            self._ddp = None
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        counting = [callback for callback in callbacks if isinstance(callback, CountTargets)]
        self._counts = counting[0] if counting else None

    def is_recorded(self, step: int) -> bool:
        """Return whether optimizer step `step` is recorded; the first one is 1."""
        return step == 1 or step % self.every == 0

    def has_file(self, step: int, total_steps: float) -> bool:
        """Return whether a recorded step of a run of `total_steps` goes into a file."""
        between = self.every
        if math.isfinite(total_steps):
            between *= math.ceil(total_steps / (self.every * self.files))
        return step == 1 or step % between == 0

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Start at the step's first micro-batch; keep DDP from averaging in its last one."""
        step = trainer.global_step + 1
        if not self.is_recorded(step):
            return
        accumulation = trainer.accumulate_grad_batches
        rows = first_tensor(batch).detach()
        self._micro_size = len(rows)
        first = rows[: self.samples].reshape(min(self.samples, len(rows)), -1)
        samples = first[:, : self.sample_tokens].tolist()
        if batch_idx % accumulation == 0:
            self._local_step = LocalStep(step, _loss_scale(trainer), samples)
            self._parts = None
            if self._ddp is None and accumulation > 1:
                self._parts = MicroBatchNorms(self._probe.parameters)
        elif self._local_step is not None and len(self._local_step.samples) < self.samples:
            missing = self.samples - len(self._local_step.samples)
            self._local_step.samples += samples[:missing]
        if self._ddp is not None and updates_after_batch(trainer):
            self._ddp.require_backward_grad_sync = False

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        """Keep the loss; separate the micro-batches' gradients if they take the place of ranks."""
        if self._local_step is None:
            return
        # Lightning has divided it.
        self._local_step.losses.append(loss.detach() * trainer.accumulate_grad_batches)
        targets = torch.ones_like(loss)
        if self._counts is not None:
            targets = self._counts.counts[-1]
        self._local_step.targets.append(targets)
        if self._parts is not None:
            self._parts.before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """After the last micro-batch, read this rank's gradients, and average."""
        local_step = self._local_step
        if local_step is None:
            return
        if self._parts is not None:
            self._parts.after_backward()
        if not updates_after_batch(trainer):
            return
        local_step.before = self._probe.gradients()
        if self._ddp is not None:
            average_like_ddp(self._ddp, self._keeps_gradients(trainer))
            self._ddp.require_backward_grad_sync = True
            self._ddp.require_forward_param_sync = True  # as after a backward that averages
        local_step.weights = self._probe.weights()

    def _keeps_gradients(self, trainer: Trainer) -> bool:
        strategy = trainer.strategy
        return isinstance(strategy, DDPStrategy) and strategy.keeps_gradients

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Read the average as the optimizer gets it, before clipping."""
        if self._local_step is not None:
            self._local_step.after = self._probe.gradients()

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """After the update, gather all ranks' values, measure, log, and write."""
        local_step = self._local_step
        self._local_step = None
        if local_step is None:
            return
        squares = self._parts.squares if self._parts else []
        factor = self._counts.factor if self._counts is not None else 1.0
        table = from_all_ranks(local_step.as_vector(self._probe.weights(), squares, factor))
        samples = gathered_objects(local_step.samples)
        recorded = Step(self._probe, table, (self._micro_size, trainer.accumulate_grad_batches))
        self._measure(trainer, pl_module, recorded, step)
        if trainer.is_global_zero and self.has_file(step, trainer.estimated_stepping_batches):
            noise = {"noise_scale": self.noise.scale, "advice": self._advice}
            texts = [self._texts(of_rank) for of_rank in samples[: self.ranks]]
            content = describe(recorded, self._probe, texts, self.ranks)
            content["tokens_per_sample"] = self._tokens_per_sample
            write_recording(self._run, {"step": step, **content, **noise})

    def _texts(self, samples: list[list[Any]]) -> list[str]:
        if self._tokenizer is None:
            return [" ".join(f"{number:.4g}" for number in sample) for sample in samples]
        return [self._tokenizer.decode(ids) for ids in samples]

    def _measure(self, trainer: Trainer, pl_module: Any, recorded: Step, step: int) -> None:
        measurement = recorded.measurement
        if measurement is None:
            return
        self.noise.add(measurement)
        self._advice = advice(self.noise.scale, measurement.big_batch, self._tokens_per_sample)
        if self.noise.scale is not None:
            row = {NOISE_SCALE: self.noise.scale}
            if self._tokens_per_sample:
                row["trainer/tokens"] = step * measurement.big_batch * self._tokens_per_sample
            log_row(trainer.loggers, row, step)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the advice on the batch size and the panel's command; send the panel to trackers."""
        if trainer.is_global_zero:
            command = f"{typed('panel')} {self._run}"
            logger.info("\n%s\n  the all-reduce, step by step: %s", self._advice, command)
            for run in tracked_runs(trainer.loggers):
                run.log_html("sync/panel", panel_page(self._run), trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages of the noise scale, so that a resumed run continues with them."""
        return {"noise": self.noise.state_dict(), "advice": self._advice}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's averages."""
        self.noise.load_state_dict(state_dict["noise"])
        self._advice = state_dict["advice"]


def first_tensor(batch: Any) -> Tensor:
    """Return the first tensor of a batch of any nesting that has a row for each sample.

    Raises:
        UserError: there is none.
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> None:
        if tensor.ndim:
            found.append(tensor)

    apply_to_collection(batch, Tensor, note)
    if not found:
        kind = type(batch).__name__
        raise UserError(
            f"callbacks=sync_panel shows samples of a batch, and this {kind} has no tensor with "
            "a row for each; remove it"
        )
    return found[0]


def gathered_objects(value: Any) -> list[Any]:
    """Return every rank's `value`, by rank; their sizes may differ, as with padded sequences."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _loss_scale(trainer: Trainer) -> float:
    """Return the loss scale of `precision=16-mixed`, or 1."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
