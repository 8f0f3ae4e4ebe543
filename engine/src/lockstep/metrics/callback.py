"""Measures the run: one row every `log_every` steps, to `metrics.csv` and every other logger."""

import logging
import statistics
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch.optim import Optimizer

from lockstep.batch import Batch
from lockstep.callbacks.step import InRow, StepCallback
from lockstep.loading.loaders import TrainLoader, batch_size_of, samples_per_step
from lockstep.loggers.step_rows import StepNumber, log_row, number_rows
from lockstep.metrics.epoch_values import EpochValues
from lockstep.metrics.mean import Mean, entries_of_ranks, means_of
from lockstep.metrics.rows import COLUMNS, OF_TOKENS
from lockstep.processes import freeze_lasting_objects
from lockstep.ranks.peaks import FORMS, peak_of
from lockstep.settings import check_number, check_whole, counted, not_a_config
from lockstep.strategies.optimizers import is_compiled

logger = logging.getLogger(__name__)


def peak_here(trainer: Trainer) -> float | None:
    """Return the peak of this rank's device in TFLOP/s, if known: of GPUs by NVIDIA."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or trainer.precision not in FORMS:
        return None
    return peak_of(torch.cuda.get_device_name(device), str(trainer.precision))


def tokens_of(trainer: Trainer) -> int | None:
    """Return the tokens of a sample, if the Trainer's data module has such a number."""
    tokens = getattr(getattr(trainer, "datamodule", None), "tokens_per_sample", None)
    return tokens if isinstance(tokens, int) else None


@not_a_config
@dataclass(eq=False)
class Metrics(StepCallback):
    """Logs a row of the run: every `Mean` of the module, the rate, the speed, and the memory.

    It reads the device only at logging steps; in between, values stay on it. Every value is also in
    `trainer.callback_metrics`, for callbacks that monitor one. Callbacks that are `InRow` add
    columns.

        >>> batch = lockstep.Batch(global_size=32)
        >>> trainer = Trainer(callbacks=[lockstep.Metrics(batch, every=10)], log_every_n_steps=10)

    Args:
        batch: how many samples a step has, unless the loader's batches have another size; None:
            rows have no speed in samples or tokens.
        every: steps between rows.
        tokens_per_sample: of text; None: `tokens_per_sample` of the Trainer's data module, if it
            has such a number.
        flops_per_token: operations of the forward and backward pass; None: `flops_per_token` of
            the module, if it has one. The utilization, MFU, is as in Chowdhery et al. 2022,
            appendix B, with causal attention.
        peak_tflops: of one device, in the precision of training; None: looked up by its name.
    """

    batch: Batch | None = None
    every: int = 50
    tokens_per_sample: int | None = None
    flops_per_token: float | None = None
    peak_tflops: float | None = None
    # The newest value of each metric, for display.
    row: dict[str, float] = field(default_factory=dict, init=False)
    training_seconds: float = field(default=0.0, init=False)  # without validation
    training_steps: int = field(default=0, init=False)
    first_step_seconds: float | None = field(default=None, init=False)  # including compilation
    # Clock at the last row, then at the end of each step.
    _times: list[float] = field(default_factory=list, init=False)
    _waited: float = field(default=0.0, init=False)  # for data, up to the last row
    _paused_at: float = field(default=0.0, init=False)
    _number: StepNumber | None = field(default=None, init=False)  # of the step, for our loggers
    _means: dict[str, Mean] = field(default_factory=dict, init=False)
    _trained: dict[str, int] = field(default_factory=dict, init=False)  # mean -> its entries then
    _measured: dict[str, float] = field(default_factory=dict, init=False)  # by a validation or test
    _epoch_values: EpochValues = field(default_factory=EpochValues, init=False)
    _rate: float | None = field(default=None, init=False)  # of the last update

    full_tflops: float | None = field(default=None, init=False)  # of all devices together
    _loaded: int | None = field(default=None, init=False)  # samples of a step, as loaders have them
    _tokens: int | None = field(default=None, init=False)  # of a sample; None: no text
    _operations: float = field(default=0.0, init=False)  # per token
    _tells_first_step: bool = field(default=False, init=False)  # a compiled model's is long
    _world_size: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        check_whole("log_every", self.every, at_least=1)
        if self.peak_tflops is not None:
            check_number("peak_tflops", self.peak_tflops, above=0)

    @property
    def samples_per_step(self) -> int | None:
        """Samples of a step over all ranks; None if no batch tells."""
        if self.batch is None:
            return None
        return self._loaded or self.batch.global_size

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step over all ranks; None: no text."""
        if self.samples_per_step is None or self._tokens is None:
            return None
        return self.samples_per_step * self._tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out what a step computes, and how fast these devices could compute it."""
        super().setup(trainer, pl_module, stage)
        self._world_size = trainer.world_size
        self._tokens = self.tokens_per_sample or tokens_of(trainer)
        self._operations = self.flops_per_token or 0.0
        if self.flops_per_token is None:
            self._operations = getattr(pl_module, "flops_per_token", 0.0)
        if self._operations:
            peak = self.peak_tflops or peak_here(trainer)
            self.full_tflops = peak * trainer.world_size if peak else None

    def continue_from(self, earlier: dict[str, str]) -> None:
        """Take over the newest values of an earlier part of the run."""
        names = [name for name in COLUMNS if name in earlier]
        self.row = {name: float(earlier[name]) for name in names}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._count_samples(trainer)
        self._tells_first_step = is_compiled(pl_module)
        self._means = means_of(pl_module)
        self._number = StepNumber(trainer)
        number_rows(trainer.loggers, self._number)
        self._times = [time.perf_counter()]

    def _count_samples(self, trainer: Trainer) -> None:
        """Count the samples that the loader's batches have; say so if the batch says others."""
        size = batch_size_of(trainer.train_dataloader)
        if self.batch is None or size is None:
            return
        samples = samples_per_step(trainer, size)
        self._loaded = samples
        if samples != self.batch.global_size and trainer.is_global_zero:
            logger.warning(
                "train_dataloader makes batches of %s, so a step has %d, but the batch says %d per "
                "device and %d per step, for which the receipt's rate is; give the loader "
                "batch_size=batch.micro_size, or return lockstep.train_loader",
                counted(size, "sample"),
                samples,
                self.batch.micro_size,
                self.batch.global_size,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Let Lightning number rows again."""
        number_rows(trainer.loggers, None)

    on_exception = on_train_end  # type: ignore[assignment]

    def on_train_batch_start(self, *_arguments: Any) -> None:
        """Number what is logged from now on."""
        assert self._number is not None
        self._number.begin()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the rate of this update; a scheduler then sets that of the next one."""
        groups = optimizer.param_groups  # none if `configure_optimizers` has returned None
        self._rate = groups[0]["lr"] if groups else None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Complete the values of an epoch that a resumed run continues."""
        self._epoch_values.after_batch(trainer)
        super().on_train_batch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the values of the next epoch be its own."""
        self._epoch_values.end_epoch()

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Log a row if one is due, and at the end."""
        self._times.append(time.perf_counter())
        if self.first_step_seconds is None:
            freeze_lasting_objects()  # what model, compiler, and Trainer have made stays
            self.first_step_seconds = self._times[-1] - self._times[0]
            if self._tells_first_step:
                logger.info("compiled: the first step took %.1f s", self.first_step_seconds)
        if step % self.every and step != trainer.max_steps:
            return
        row = self._measure(trainer, step)
        pl_module.log_dict(row, logger=False)
        self._log(trainer, step, row)
        for callback in callbacks_of(trainer):
            callback.after_row(step)

    def _measure(self, trainer: Trainer, step: int) -> dict[str, float]:
        """Return the values since the last row, and restart the clock."""
        # These wait for the device, so that the clock is read after the work that it measures.
        row = self._take_means(self._means)
        if self._rate is not None:
            row["optim/lr"] = float(self._rate)
        for callback in callbacks_of(trainer):
            row.update(callback.in_row(step))
        durations = [after - before for before, after in pairwise(self._times)]
        p50, p95 = p50_and_p95(durations)
        now = time.perf_counter()
        seconds = now - self._times[0]
        self._times = [now]
        self.training_seconds += seconds
        self.training_steps += len(durations)
        if self.tokens_per_step is not None:
            tokens_per_second = len(durations) * self.tokens_per_step / seconds
            row["throughput/tokens_per_second"] = tokens_per_second
            if self.full_tflops:
                tflops = tokens_per_second * self._operations / 1e12
                row["throughput/mfu"] = tflops / self.full_tflops
        elif self.samples_per_step is not None:
            samples = len(durations) * self.samples_per_step
            row["throughput/samples_per_second"] = samples / seconds
        row["throughput/step_seconds"] = seconds / len(durations)
        row["throughput/step_seconds_p50"] = p50
        row["throughput/step_seconds_p95"] = p95
        row["system/peak_memory_gb"] = peak_memory() / 1e9
        loader = trainer.train_dataloader
        if isinstance(loader, TrainLoader):
            row["data/wait_share"] = (loader.waited - self._waited) / seconds
            self._waited = loader.waited
        return row

    def _take_means(self, means: Mapping[str, Mean]) -> dict[str, float]:
        """Return the columns of those means that have values, and let them start anew."""
        row: dict[str, float] = {}
        for name, ranks in entries_of_ranks(means).items():
            row.update(self._means[name].columns(ranks))
            self._means[name].reset()
        return row

    @property
    def _absent(self) -> Collection[str]:
        """Columns that a run without tokens only has if its module logs them."""
        return () if self.tokens_per_step else OF_TOKENS

    def in_summary(self, step: int) -> dict[str, Any]:
        """Return `summary.json`'s entries for a run that ends after optimizer step `step`."""
        entries: dict[str, Any] = {"world_size": self._world_size}
        if self.samples_per_step is not None:
            entries["global_batch_size"] = self.samples_per_step
        if self.tokens_per_step is not None:
            # Of all ranks together, over all steps since this start, without validation.
            speed = self.training_steps * self.tokens_per_step / max(self.training_seconds, 1e-9)
            entries["tokens"] = step * self.tokens_per_step
            entries["tokens_per_second"] = speed or None  # None without any step
        elif self.samples_per_step is not None:
            size = self.samples_per_step
            speed = self.training_steps * size / max(self.training_seconds, 1e-9)
            entries["samples"] = step * size
            entries["samples_per_second"] = speed or None
        entries["first_step_seconds"] = self.first_step_seconds
        entries |= {
            name: self.row.get(column)
            for column, name in COLUMNS.items()
            if name and (column in self.row or column not in self._absent)
        }
        return entries

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: throughput is for training only."""
        self._paused_at = time.perf_counter()
        self._means = means_of(pl_module)
        self._trained = {name: mean.count for name, mean in self._means.items()}
        self._epoch_values.begin_validation(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute what the validation has measured, also for callbacks that monitor it."""
        self._epoch_values.end_validation(pl_module)
        updated = {
            name: mean
            for name, mean in self._means.items()
            if mean.count > self._trained[name] or self._trained[name] == 0
        }
        self._measured = self._take_means(updated)
        if trainer.sanity_checking:  # that is no result
            self._measured = {}
            return
        is_fit = trainer.state.fn == "fit"  # then the row is logged below
        log_equal(pl_module, self._measured, logger=not is_fit and bool(trainer.loggers))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the validation has measured, and restart the clock."""
        if trainer.state.fn != "fit":  # of `Trainer.validate`, which logs it itself
            self.row.update(self._measured)
            return
        self.leave_out(time.perf_counter() - self._paused_at)
        if self._measured:
            self._log(trainer, trainer.global_step, self._measured)

    on_test_start = on_validation_start

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute what the test has measured; `Trainer.test` returns it."""
        self._measured = self._take_means(self._means)
        log_equal(pl_module, self._measured, logger=bool(trainer.loggers))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what the test has measured, which Lightning has logged, for the summary."""
        self.row.update(self._measured)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save what has been measured so far; every rank must call this."""
        table = entries_of_ranks(means_of(pl_module))
        checkpoint["means"] = {
            name: sorted([*entry] for entries in ranks for entry in entries)
            for name, ranks in table.items()
        }
        checkpoint["epoch_values"] = self._epoch_values.save(trainer, pl_module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue with what had been measured."""
        if not self.trains:
            return
        saved = checkpoint.get("means", {})  # another Trainer's has none
        for name, mean in means_of(pl_module).items():
            mean.load_entries(saved.get(name, []) if trainer.is_global_zero else [])
        self._epoch_values.load(trainer, pl_module, checkpoint.get("epoch_values", {}))

    def leave_out(self, pause: float) -> None:
        """Don't count the last `pause` seconds as training."""
        self._times = [clock + pause for clock in self._times]

    def _log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        row = dict(metrics)
        if self.tokens_per_step is not None:
            row = {"trainer/tokens": step * self.tokens_per_step, **row}
        self.row.update(row)
        log_row(trainer.loggers, row, step)


def callbacks_of(trainer: Trainer) -> list[InRow]:
    """Return the callbacks that add columns to the rows."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, InRow)]


def log_equal(pl_module: LightningModule, row: dict[str, float], *, logger: bool) -> None:
    """Log values that all ranks have: their maximum is each one without rounding."""
    pl_module.log_dict(row, logger=logger, sync_dist=True, reduce_fx="max")


def p50_and_p95(durations: list[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile; one duration is both."""
    if len(durations) == 1:
        return durations[0], durations[0]
    cuts = statistics.quantiles(durations, n=20, method="inclusive")  # at 5%, 10%, ..., 95%
    return cuts[9], cuts[18]


def peak_memory() -> int:
    """Return the peak bytes of tensors on this GPU, or, without one, of this process."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes; the other systems count KiB
    return getrusage(RUSAGE_SELF).ru_maxrss * unit
