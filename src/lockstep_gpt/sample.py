"""Shows what the model has learned: continues a prompt."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, Trainer

from lockstep_gpt.distributed.strategies import layout_of
from lockstep_gpt.model.sampling import check_sampling
from lockstep_gpt.run.loggers.tracking import tracked_runs
from lockstep_gpt.settings import not_a_config
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.tokenizer import Tokenizer, printable
from lockstep_gpt.tokens.windows import read_windows

logger = logging.getLogger(__name__)


@not_a_config
@dataclass(eq=False)
class Sample(Callback):
    """Continues a prompt with the trained model; without a text tokenizer, shows nothing."""

    prompt: str | None  # what to continue; None: a few words of the validation text
    length: int  # tokens to add
    temperature: float  # divides the logits; 0 picks the likeliest token
    tokenizer: Tokenizer  # of the model
    seed: int  # of the random choices
    new_model: Callable[[], Any]  # returns another model of the kind that is trained
    at_validation: bool = False  # also after each validation, not only at the end

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Raise a `UserError` now for what `generate` would reject after hours of training."""
        tokenizer = self.tokenizer
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
        tokenizer = self.tokenizer
        if tokenizer.end_of_text is None:
            return
        layout = layout_of(trainer.strategy)
        # Every rank takes part.
        model: Any = layout.whole_model(pl_module.model, self.new_model)
        if not trainer.is_global_zero:
            return
        device = next(model.parameters()).device
        words = self.prompt
        if words is None:
            words = prompt_from(getattr(trainer, "datamodule", None), tokenizer) or "\n"
        prompt = torch.tensor(tokenizer.encode(words).astype("int64"), device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
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
    tokens, _ = read_windows(data.windows["val"], [0])
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
