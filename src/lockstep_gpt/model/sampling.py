"""How `GPT.generate` chooses the next token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep_gpt.errors import UserError


def check_sampling(tokens: Tensor, temperature: float, top_k: int | None) -> None:
    """Raise a `UserError` for arguments that `generate` cannot use."""
    if tokens.shape[1] == 0:
        raise UserError("the prompt is empty; give at least one token")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature={temperature} must be at least 0; 0 is the likeliest token")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} must be at least 1; omit it to sample from all tokens")


def sample_tokens(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token, (B, 1), from each row of `logits`, (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        weakest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < weakest, -math.inf)
    return torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
