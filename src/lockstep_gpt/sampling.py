"""How `GPT.generate` chooses the next token."""

import math

import torch
import torch.nn.functional as F
from lockstep.errors import UserError
from torch import Tensor

COLD = 1e-6  # a lower temperature picks the likeliest token: a quotient would overflow
BROKEN = "the model's logits are infinite or not numbers; use another checkpoint"


def check_sampling(tokens: Tensor, temperature: float, top_k: int | None) -> None:
    """Raise a `UserError` for arguments that `generate` cannot use."""
    if tokens.shape[1] == 0:
        raise UserError("the prompt is empty; give at least one token")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(
            f"temperature={temperature} must be at least 0; 0 picks the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} must be at least 1; omit it to sample from all tokens")


def sample_tokens(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token, (B, 1), from each row of `logits`, (B, V)."""
    if temperature < COLD:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        weakest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < weakest, -math.inf)
    return draw_tokens(F.softmax(logits / temperature, dim=-1), generator)


def draw_tokens(likely: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token, (B, 1), by the probabilities of each row of `likely`, (B, V).

    The token whose probability is highest after division by an exponential random number is a
    sample (Yellott 1977). `torch.multinomial` draws the same token, but also checks its arguments,
    for which a GPU's host must wait twice.
    """
    times = torch.empty_like(likely).exponential_(generator=generator)
    return (likely / times).argmax(dim=-1, keepdim=True)
