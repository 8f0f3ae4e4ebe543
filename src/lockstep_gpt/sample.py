"""Shows what the model has learned: continues a prompt."""

import logging
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lockstep.loggers import tracked_runs
from lockstep.settings import check_number, check_switch, check_whole
from lockstep.strategies import layout_of
from lockstep.tokens import Tokenizer, check_sampling, printable, prompt_of

logger = logging.getLogger(__name__)


class Sample(Callback):
    """Continues a prompt with the trained GPT; without a text tokenizer, shows nothing.

    Args:
        prompt: what to continue; None: a few words of the validation text.
        length: tokens to add.
        temperature: divides the logits; 0 picks the likeliest token.
        seed: of the random choices.
        at_validation: also after each validation, not only at the end.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(
        self,
        prompt: str | None = None,
        length: int = 300,
        temperature: float = 0.8,
        seed: int = 1337,
        at_validation: bool = False,
    ) -> None:
        check_whole("length", length, at_least=0)
        check_number("temperature", temperature, at_least=0)
        check_whole("seed", seed, at_least=0)
        check_switch("at_validation", at_validation)
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.seed = seed
        self.at_validation = at_validation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a `UserError` now for what `generate` would reject after hours of training."""
        tokenizer = text_tokenizer(trainer)
        if tokenizer is not None:
            tokens = tokenizer.encode("\n" if self.prompt is None else self.prompt)
            check_sampling(torch.tensor(tokens.astype("int64"))[None], self.temperature, None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a sample during the run; the last step has one at the end."""
        if self.at_validation and trainer.global_step < trainer.max_steps:
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a sample of what was learned, the same one for the same weights."""
        self._log(trainer, pl_module)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tokenizer = text_tokenizer(trainer)
        if tokenizer is None or not can_generate(pl_module):
            return
        module: Any = pl_module
        # Every rank takes part.
        model: Any = layout_of(trainer.strategy).whole_model(module.model, module.new_model)
        if not trainer.is_global_zero:
            return
        device = next(model.parameters()).device
        words = self.prompt
        if words is None:
            words = prompt_from(data_of(trainer), tokenizer) or "\n"
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


def can_generate(module: Any) -> bool:
    """Return whether a module has a model like ours, and can make another one."""
    return hasattr(getattr(module, "model", None), "generate") and hasattr(module, "new_model")


def data_of(trainer: Trainer) -> Any:
    """Return the Trainer's data module, if it has one."""
    return getattr(trainer, "datamodule", None)


def text_tokenizer(trainer: Trainer) -> Tokenizer | None:
    """Return the tokenizer of the data, if they are text."""
    tokenizer: Tokenizer | None = getattr(data_of(trainer), "tokenizer", None)
    if tokenizer is None or tokenizer.end_of_text is None:
        return None
    return tokenizer


def prompt_from(data: Any, tokenizer: Tokenizer) -> str:
    """Return up to three words of a run's validation text; empty if it has no readable ones."""
    windows = getattr(data, "windows", {})
    return prompt_of(windows["val"], tokenizer) if "val" in windows else ""
