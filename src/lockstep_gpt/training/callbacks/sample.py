"""Writes a sample of text when training ends."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning import Callback, Trainer

logger = logging.getLogger(__name__)


class Sample(Callback):
    """Continues a prompt with the trained model; models of mere numbers have nothing to show.

    Args:
        prompt: what to continue.
        length: tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
    """

    def __init__(self, prompt: str, length: int, temperature: float) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the sample, the same one for the same weights."""
        tokenizer = pl_module.tokenizer
        if not trainer.is_global_zero or tokenizer.end_of_text is None:
            return
        device = pl_module.device
        prompt = torch.tensor(tokenizer.encode(self.prompt).astype("int64"), device=device)
        generator = torch.Generator(device).manual_seed(pl_module.config.seed)
        tokens = pl_module.model.generate(
            prompt[None], self.length, self.temperature, generator=generator
        )
        text = tokenizer.decode(tokens[0].tolist())
        logger.info("%s", "\n".join(["", "sample", *(f"  | {line}" for line in text.splitlines())]))
