"""Shows progress in a bar or in lines, and at the end what the model has learned."""

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer
from tqdm import tqdm

from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.tokenizer import Tokenizer, printable
from lockstep_gpt.distributed.strategies import layout_of
from lockstep_gpt.model.sampling import check_sampling
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.run.loggers.tracking import tracked_runs

logger = logging.getLogger(__name__)


class Progress(StepCallback):
    """Shows the row that `Metrics` read last, so it never waits for the device itself.

    Without a terminal, it prints lines at least `line_seconds` apart.
    """

    def __init__(self, line_seconds: float = 5.0) -> None:
        self.line_seconds = line_seconds
        self._bar: tqdm[Any] | None = None
        self._start_step = 0
        self._start_time = 0.0
        self._last_line_time = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bar at the step where the run starts or resumes."""
        super().on_train_start(trainer, pl_module)
        self._metrics = next(item for item in trainer.callbacks if isinstance(item, Metrics))
        self._start_step = trainer.global_step
        self._start_time = time.perf_counter()
        self._last_line_time = self._start_time
        if trainer.is_global_zero and sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
            self._bar = tqdm(
                total=trainer.max_steps,
                initial=trainer.global_step,
                dynamic_ncols=True,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            )

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Advance by one step."""
        logged = step % self._metrics.every == 0 or step == trainer.max_steps
        if self._bar is not None:
            if logged:
                self._bar.set_postfix_str(self._values(), refresh=False)
            self._bar.update()
        elif logged and trainer.is_global_zero:
            self._line(step, trainer.max_steps)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the validation loss on a permanent line."""
        loss = trainer.callback_metrics.get("val/loss")
        if trainer.is_global_zero and loss is not None:
            total = trainer.max_steps
            step = f"step {trainer.global_step:{len(str(total))}}/{total}"
            logger.info("%s  val_loss %.4f", step, loss)

    def on_train_end(self, *_arguments: Any) -> None:
        """Leave the bar on the screen, and the next line free for an error."""
        if self._bar is not None:
            self._bar.close()

    on_exception = on_train_end  # type: ignore[assignment]

    def _line(self, step: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._last_line_time < self.line_seconds and step < total:
            return
        self._last_line_time = now
        left = (total - step) * (now - self._start_time) / (step - self._start_step)
        text = f"step {step:{len(str(total))}}/{total}  {self._values()}  {left:.0f} s left"
        logger.info("%s", text)

    def _values(self) -> str:
        row = self._metrics.row
        speed = tqdm.format_sizeof(row["throughput/tokens_per_second"])
        text = f"loss {row['train/loss']:.4f}  lr {row['optim/lr']:.2e}  {speed} tok/s"
        if "throughput/mfu" in row:
            text += f"  mfu {row['throughput/mfu']:.0%}"
        if "data/wait_share" in row:
            text += f"  data {row['data/wait_share']:.0%}"
        return text


@dataclass(eq=False)
class Sample(Callback):
    """Continues a prompt with the trained model; without a text tokenizer, shows nothing."""

    prompt: str | None  # what to continue; None: a few words of the validation text
    length: int  # tokens to add
    temperature: float  # divides the logits; 0 picks the likeliest token
    at_validation: bool = False  # also after each validation, not only at the end

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Raise a `UserError` now for what `generate` would reject after hours of training."""
        tokenizer = pl_module.tokenizer
        if tokenizer.end_of_text is not None:
            tokens = tokenizer.encode("\n" if self.prompt is None else self.prompt)
            check_sampling(torch.tensor(tokens.astype("int64"))[None], self.temperature, None)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log a sample during the run; the last step has one at the end."""
        if self.at_validation and trainer.global_step < trainer.max_steps:
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log a sample of what was learned, the same one for the same weights."""
        self._log(trainer, pl_module)

    def _log(self, trainer: Trainer, pl_module: Any) -> None:
        tokenizer = pl_module.tokenizer
        if tokenizer.end_of_text is None:
            return
        layout = layout_of(trainer.strategy)
        model: Any = layout.whole_model(pl_module.model)  # every rank takes part
        if not trainer.is_global_zero:
            return
        device = next(model.parameters()).device
        words = self.prompt
        if words is None:
            words = prompt_from(getattr(trainer, "datamodule", None), tokenizer) or "\n"
        prompt = torch.tensor(tokenizer.encode(words).astype("int64"), device=device)
        generator = torch.Generator(device).manual_seed(pl_module.config.seed)
        tokens = model.generate(prompt[None], self.length, self.temperature, generator=generator)
        text = tokenizer.decode(tokens[0].tolist())
        step = trainer.global_step
        for run in tracked_runs(trainer.loggers):
            row = [step, words, text]
            run.log_table("samples", ["step", "prompt", "text"], [row], step=step)
        lines = printable(text).split("\n")
        logger.info("%s", "\n".join(["", "sample", *(f"  | {line}" for line in lines)]))


def prompt_from(data: Any, tokenizer: Tokenizer) -> str:
    """Return up to three words of a run's validation text; empty if it has no readable ones."""
    if not isinstance(data, TokenDataModule):
        return ""
    rows = np.concatenate([*data.rows_by_part("val", data.validated, 0, 1).values()])
    tokens, _ = next(data.batches("val", rows[:1], torch.device("cpu")))
    text = tokenizer.decode(tokens[0].tolist())
    # A line starts like a sentence. A window may have no whole line, and its first word may be cut.
    pieces = [*text.split("\n")[1:], text.partition(" ")[2]]
    longest = max((_readable_words(piece)[:3] for piece in pieces), key=len)
    return " ".join(longest)


def _readable_words(text: str) -> list[str]:
    unreadable = ("\ufffd", "<|")  # half a character, a special token
    return [
        word
        for word in text.split()
        if word.isprintable() and not any(part in word for part in unreadable)
    ]
