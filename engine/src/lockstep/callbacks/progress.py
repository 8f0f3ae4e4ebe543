"""Shows progress in a bar or in lines."""

import logging
import math
import sys
import time
from typing import Any

from lightning import Trainer
from tqdm import tqdm

from lockstep.callbacks.step import StepCallback, only
from lockstep.metrics.callback import Metrics
from lockstep.settings import as_column

logger = logging.getLogger(__name__)


class Progress(StepCallback):
    """Shows the row that `Metrics` read last, so it never waits for the device itself.

        >>> callbacks = [lockstep.Metrics(every=10), lockstep.Progress()]
        >>> trainer = Trainer(callbacks=callbacks, enable_progress_bar=False)

    Args:
        line_seconds: without a terminal, it prints lines at least so far apart.
        monitored: the metric that it prints after each validation.
    """

    def __init__(self, line_seconds: float = 5.0, monitored: str = "val/loss") -> None:
        self.line_seconds = line_seconds
        self.monitored = monitored
        self._bar: tqdm[Any] | None = None
        self._total: float = math.inf  # optimizer steps
        self._start_step = 0
        self._start_time = 0.0
        self._last_line_time = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bar at the step where the run starts or resumes."""
        super().on_train_start(trainer, pl_module)
        self._metrics = only(Metrics, trainer, self)
        self._total = trainer.estimated_stepping_batches  # without an end: infinite
        self._start_step = trainer.global_step
        self._start_time = time.perf_counter()
        self._last_line_time = self._start_time
        if trainer.is_global_zero and sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
            self._bar = tqdm(
                total=self._total if math.isfinite(self._total) else None,
                initial=trainer.global_step,
                dynamic_ncols=True,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            )

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Advance by one step."""
        logged = step % self._metrics.every == 0 or step == self._total
        if self._bar is not None:
            if logged:
                self._bar.set_postfix_str(self._values(trainer), refresh=False)
            self._bar.update()
        elif logged and trainer.is_global_zero:
            self._line(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the monitored metric on a permanent line."""
        value = trainer.callback_metrics.get(self.monitored)
        if trainer.is_global_zero and value is not None and not trainer.sanity_checking:
            step = self._place(trainer.global_step)
            logger.info("%s  %s %.4f", step, as_column(self.monitored), value)

    def on_train_end(self, *_arguments: Any) -> None:
        """Leave the bar on the screen, and the next line free for an error."""
        if self._bar is not None:
            self._bar.close()

    on_exception = on_train_end  # type: ignore[assignment]

    def _line(self, trainer: Trainer, step: int) -> None:
        now = time.perf_counter()
        if now - self._last_line_time < self.line_seconds and step < self._total:
            return
        self._last_line_time = now
        line = f"{self._place(step)}  {self._values(trainer)}"
        if math.isfinite(self._total):
            seconds = (now - self._start_time) / (step - self._start_step)
            line += f"  {(self._total - step) * seconds:.0f} s left"
        logger.info("%s", line)

    def _place(self, step: int) -> str:
        """Return a step among all, as far as the Trainer knows its end."""
        if not math.isfinite(self._total):
            return f"step {step}"
        return f"step {step:{len(str(self._total))}}/{self._total}"

    def _values(self, trainer: Trainer) -> str:
        """Return what the row has, and what a module has logged with `prog_bar=True`."""
        row = self._metrics.row
        shown = trainer.progress_bar_metrics
        parts = [f"{name} {value:.4g}" for name, value in shown.items() if name != "v_num"]
        if "train/loss" in row:
            parts.append(f"loss {row['train/loss']:.4f}")
        if "optim/lr" in row:
            parts.append(f"lr {row['optim/lr']:.2e}")
        if "throughput/tokens_per_second" in row:
            speed = tqdm.format_sizeof(row["throughput/tokens_per_second"])
            parts.append(f"{speed} tok/s")
        elif "throughput/samples_per_second" in row:
            speed = tqdm.format_sizeof(row["throughput/samples_per_second"])
            parts.append(f"{speed} samples/s")
        elif "throughput/step_seconds" in row:
            parts.append(f"{1 / row['throughput/step_seconds']:.3g} steps/s")
        if "throughput/mfu" in row:
            parts.append(f"mfu {row['throughput/mfu']:.0%}")
        if "data/wait_share" in row:
            parts.append(f"data {row['data/wait_share']:.0%}")
        return "  ".join(parts)
