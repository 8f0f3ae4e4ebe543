"""Measures the run: one row each `log_every` steps, to `metrics.csv` and every other logger."""

from __future__ import annotations

import logging
import math
import resource
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from lightning import Trainer

from lockstep_gpt.config import Config
from lockstep_gpt.training.callbacks.step import StepCallback

logger = logging.getLogger(__name__)

COLUMNS = [
    "trainer/step",
    "trainer/tokens",
    "train/loss",
    "val/loss",
    "val/perplexity",
    "optim/lr",
    "optim/grad_norm",
    "optim/skipped",
    "throughput/tokens_per_second",
    "throughput/step_seconds",
    "throughput/step_seconds_p50",
    "throughput/step_seconds_p95",
    "throughput/mfu",
    "data/wait_share",
    "system/peak_memory_gb",
]
# Dense peaks of 16-bit matrix products with float32 accumulation, in TFLOP/s, by what CUDA calls
# the device; from NVIDIA's data sheets and architecture papers, halved where they count sparsity.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "T4": 65.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_of(device: str) -> float | None:
    """Return the peak in TFLOP/s of the GPU that CUDA calls `device`, None where none is known."""
    words = f" {device} ".replace("-", " ")
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def peak_tflops(config: Config, world_size: int) -> float | None:
    """Return the peak of all devices together; TF32 has half of that of 16 bits."""
    peak = config.peak_tflops
    if peak is None and config.trainer["accelerator"] == "cuda":
        peak = peak_of(torch.cuda.get_device_name())
        peak = peak and peak * (0.5 if config.precision == "32-true" else 1.0)
    return peak and peak * world_size


class Metrics(StepCallback):
    """Reads the device only at logging steps: in between the loss stays there.

    `self.log` would cost a host synchronisation or a bookkeeping round at every micro-batch.

    Args:
        every: steps between rows.
        tokens_per_step: over all ranks.
        flops_per_token: of forward and backward, for the utilisation (MFU: Chowdhery et al. 2022,
            appendix B).
        peak_tflops: of all devices together; None leaves the utilisation out.
    """

    def __init__(
        self,
        every: int,
        tokens_per_step: int,
        flops_per_token: float = 0.0,
        peak_tflops: float | None = None,
    ) -> None:
        self.every = every
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self.row: dict[str, float] = {}  # the newest value of each metric, for whoever shows it
        self.training_seconds = 0.0  # without validation
        self.training_steps = 0
        self.first_step_seconds: float | None = None  # with what is compiled in it
        self._since = (0.0, 0)  # clock and step of the last row
        self._times: list[float] = []  # clock at the end of each step since then, and then itself
        self._waited = 0.0  # for data, up to then
        self._paused_at = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Mean over all ranks and steps of this start of the run, validation excluded."""
        return self.training_steps * self.tokens_per_step / max(self.training_seconds, 1e-9)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._since = (time.perf_counter(), trainer.global_step)
        self._times = [self._since[0]]

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Log a row where one is due, and at the end."""
        self._times.append(time.perf_counter())
        if self.first_step_seconds is None:
            self.first_step_seconds = self._times[-1] - self._since[0]
            if pl_module.config.compile:
                logger.info("compiled: the first step took %.1f s", self.first_step_seconds)
        if step % self.every and step != trainer.max_steps:
            return
        assert pl_module.grad_norm is not None
        loss = trainer.strategy.reduce(pl_module.take_loss(), reduce_op="mean")
        values = (loss, pl_module.grad_norm, pl_module.skipped)
        loss_value, norm, skipped = torch.stack([each.double() for each in values]).tolist()
        typical, slow = self._percentiles()
        seconds, steps = self._lap(step)
        waited, self._waited = self._waited, trainer.datamodule.training_feed.waited  # type: ignore[attr-defined]
        tokens_per_second = steps * self.tokens_per_step / seconds
        self._log(
            trainer,
            step,
            {
                **self._utilisation(tokens_per_second),
                "train/loss": loss_value,
                "optim/lr": pl_module.schedule.lr(step - 1),
                "optim/grad_norm": norm,
                "optim/skipped": skipped,  # updates so far, in the whole run
                "throughput/tokens_per_second": tokens_per_second,
                "throughput/step_seconds": seconds / steps,
                "throughput/step_seconds_p50": typical,
                "throughput/step_seconds_p95": slow,
                "data/wait_share": (self._waited - waited) / seconds,
                "system/peak_memory_gb": peak_memory() / 1e9,
            },
        )
        pl_module.refuse_broken(step)

    def summary(self, step: int) -> dict[str, Any]:
        """Return what `summary.json` says of a run that ends after optimizer step `step`."""
        row = self.row
        return {
            "tokens": step * self.tokens_per_step,
            "train_loss": row.get("train/loss"),
            "val_loss": row.get("val/loss"),
            "val_perplexity": row.get("val/perplexity"),
            "tokens_per_second": self.tokens_per_second,
            "mfu": row.get("throughput/mfu"),
            "first_step_seconds": self.first_step_seconds,
            "step_seconds_p50": row.get("throughput/step_seconds_p50"),
            "step_seconds_p95": row.get("throughput/step_seconds_p95"),
            "data_wait_share": row.get("data/wait_share"),
            "peak_memory_gb": row.get("system/peak_memory_gb"),
        }

    def _percentiles(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the steps since the last row."""
        steps = [after - before for before, after in pairwise(self._times)]
        cuts = statistics.quantiles(steps, n=20, method="inclusive") if steps[1:] else steps * 19
        return cuts[9], cuts[18]

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """Return the share of the devices' peak that the model's own operations take."""
        if self.peak_tflops is None:
            return {}
        return {
            "throughput/mfu": tokens_per_second * self.flops_per_token / (self.peak_tflops * 1e12)
        }

    def _lap(self, step: int) -> tuple[float, int]:
        """Return the seconds and steps since the last row."""
        now = time.perf_counter()
        seconds, steps = now - self._since[0], step - self._since[1]
        self._since, self._times = (now, step), [now]
        self.training_seconds += seconds
        self.training_steps += steps
        return seconds, steps

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ARG002
        """Stop the clock: throughput is that of training."""
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the validation loss and let the clock go on."""
        clock, step = self._since
        pause = time.perf_counter() - self._paused_at
        self._since, self._times = (clock + pause, step), [each + pause for each in self._times]
        assert pl_module.val_loss is not None
        metrics = {"val/loss": pl_module.val_loss, "val/perplexity": math.exp(pl_module.val_loss)}
        self._log(trainer, trainer.global_step, metrics)

    def _log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        row = {"trainer/tokens": step * self.tokens_per_step, **metrics}
        self.row.update(row)
        for logger in trainer.loggers:
            logger.log_metrics(row, step)


def peak_memory() -> int:
    """Return the most bytes that tensors on this GPU, or without one this process, ever took."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
