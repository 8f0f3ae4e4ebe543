"""Measures the run: one row every `log_every` steps, to `metrics.csv` and every other logger."""

import logging
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from lightning import Trainer

from lockstep_gpt.config import Config
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.distributed.peaks import peak_of
from lockstep_gpt.model.functional import perplexity
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.run.loggers.step_rows import StepNumber, log_row, number_rows
from lockstep_gpt.run.metrics_rows import COLUMNS

logger = logging.getLogger(__name__)


def peak_tflops(config: Config, world_size: int) -> float | None:
    """Return the peak of all devices together, if known."""
    peak = config.peak_tflops
    if peak is None and config.trainer["accelerator"] == "cuda":
        name = torch.cuda.get_device_name()
        peak = peak_of(name, config.precision)
    if peak is None:
        return None
    return peak * world_size


@dataclass(eq=False)
class Metrics(StepCallback):
    """Reads the device only at logging steps; in between, the loss stays on it.

    Then every value is also in `trainer.callback_metrics`, for callbacks that monitor one.
    """

    every: int  # steps between rows
    tokens_per_step: int  # over all ranks
    # Forward and backward. MFU is as in Chowdhery et al. 2022, appendix B, with causal attention.
    flops_per_token: float = 0.0
    peak_tflops: float | None = None  # of all devices together; None omits the utilization
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

    def continue_from(self, earlier: dict[str, str]) -> None:
        """Take over the newest values of an earlier part of the run."""
        self.row = {name: float(earlier[name]) for name in COLUMNS if name in earlier}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._number = StepNumber(trainer)
        number_rows(trainer.loggers, self._number)
        pl_module.logs_losses = False
        self._times = [time.perf_counter()]

    def on_train_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Let Lightning log again, and number rows itself."""
        pl_module.logs_losses = True
        number_rows(trainer.loggers, None)

    on_exception = on_train_end  # type: ignore[assignment]

    def on_train_batch_start(self, *_arguments: Any) -> None:
        """Number what is logged from now on."""
        assert self._number is not None
        self._number.begin()

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Log a row if one is due, and at the end."""
        self._times.append(time.perf_counter())
        if self.first_step_seconds is None:
            self.first_step_seconds = self._times[-1] - self._times[0]
            if pl_module.config.compile:
                logger.info("compiled: the first step took %.1f s", self.first_step_seconds)
        if step % self.every and step != trainer.max_steps:
            return
        row = self._measure(trainer, pl_module, step)
        pl_module.log_dict(row, logger=False)
        self._log(trainer, step, row)
        pl_module.skipped.refuse_broken(step)

    def _measure(self, trainer: Trainer, pl_module: Any, step: int) -> dict[str, float]:
        """Return the values since the last row, and restart the clock."""
        # These wait for the device, so that the clock is read after the work that it measures.
        loss = float(pl_module.losses.take().mean())
        grad_norm = float(pl_module.grad_norm)
        skipped = float(pl_module.skipped.count)
        durations = [after - before for before, after in pairwise(self._times)]
        p50, p95 = p50_and_p95(durations)
        now = time.perf_counter()
        seconds = now - self._times[0]
        self._times = [now]
        self.training_seconds += seconds
        self.training_steps += len(durations)
        tokens_per_second = len(durations) * self.tokens_per_step / seconds
        row = {}
        if self.peak_tflops:
            tflops = tokens_per_second * self.flops_per_token / 1e12
            row["throughput/mfu"] = tflops / self.peak_tflops
        row["train/loss"] = loss
        row["optim/lr"] = pl_module.schedule.lr(step - 1)
        row["optim/grad_norm"] = grad_norm
        row["optim/skipped"] = skipped  # updates so far in the whole run
        row["throughput/tokens_per_second"] = tokens_per_second
        row["throughput/step_seconds"] = seconds / len(durations)
        row["throughput/step_seconds_p50"] = p50
        row["throughput/step_seconds_p95"] = p95
        row["system/peak_memory_gb"] = peak_memory() / 1e9
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, TokenDataModule):
            waited = data.training_feed.waited
            row["data/wait_share"] = (waited - self._waited) / seconds
            self._waited = waited
        return row

    def in_summary(self, step: int) -> dict[str, Any]:
        """Return `summary.json`'s entries for a run that ends after optimizer step `step`."""
        # Of all ranks together, over all steps since this start, without validation.
        speed = self.training_steps * self.tokens_per_step / max(self.training_seconds, 1e-9)
        entries = {
            "tokens": step * self.tokens_per_step,
            "tokens_per_second": speed or None,  # None without any step
            "first_step_seconds": self.first_step_seconds,
            **{name: self.row.get(column) for column, name in COLUMNS.items() if name},
        }
        if "test/loss" in self.row:
            entries["test_loss"] = self.row["test/loss"]
        return entries

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop the clock: throughput is for training only."""
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the validation loss and restart the clock."""
        if trainer.state.fn != "fit":  # of `Trainer.validate`, which logs it itself
            return
        self.leave_out(time.perf_counter() - self._paused_at)
        loss = pl_module.val_loss
        metrics = {"val/loss": loss, "val/perplexity": perplexity(loss)}
        self._log(trainer, trainer.global_step, metrics)

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep the test loss, which Lightning has logged, for the summary."""
        self.row["test/loss"] = float(trainer.callback_metrics["test/loss"])

    def leave_out(self, pause: float) -> None:
        """Don't count the last `pause` seconds as training."""
        self._times = [clock + pause for clock in self._times]

    def _log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        row = {"trainer/tokens": step * self.tokens_per_step, **metrics}
        self.row.update(row)
        log_row(trainer.loggers, row, step)


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
