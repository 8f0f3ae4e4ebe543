"""How the next token is drawn from the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.model.sampling import BROKEN, COLD, draw_tokens


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: divides the logits; 0 picks the likeliest token.
        top_k: draws from the k likeliest tokens; None: from all.
        top_p: of these, draws from the likeliest whose probabilities add up to this (Holtzman et
            al. 2020).
        seed: of the random numbers; the same seed draws as `GPT.generate` does.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1337

    def __post_init__(self) -> None:
        for name, value, fits, rule in (
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, f"from 0 to {2**63 - 1}"),
        ):
            if not fits or not math.isfinite(value or 0):
                raise UserError(f"{name}={value} must be {rule}")

    def draw(self, logits: Tensor, source: torch.Generator) -> int:
        """Return a token, drawn from `logits`, (1, V), which are in the host's memory."""
        if not bool(logits.isfinite().all()):
            raise RunError(BROKEN)
        logits = logits.float()
        if self.temperature < COLD:
            return int(logits.argmax())
        if self.top_k is not None:
            weakest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < weakest, -math.inf)
        likely = ((logits - logits.max()) / self.temperature).softmax(dim=-1)
        if self.top_p < 1:
            falling, order = likely.sort(descending=True)
            needless = falling.cumsum(dim=-1) - falling >= self.top_p
            needless[:, 0] = False  # also if `top_p` is 0 in float32
            likely = likely.scatter(-1, order, falling.masked_fill(needless, 0))
        return int(draw_tokens(likely, source))
