"""Further tokens of a text, drawn from a model's logits, and what to continue.

In shapes: B samples, T tokens, V vocabulary size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import RunError, UserError
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.windows import Windows, read_windows

COLD = 1e-6  # a lower temperature picks the likeliest token: a quotient would overflow
BROKEN = "the model's logits are infinite or not numbers; use another checkpoint"
FEW_OPERATIONS = 1 << 30  # of a forward pass; with fewer, threads mostly wait for each other


def check_sampling(tokens: Tensor, temperature: float, top_k: int | None) -> None:
    """Raise a `UserError` for arguments that `continued` cannot use."""
    if tokens.shape[1] == 0:
        raise UserError("the prompt is empty; give at least one token")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(
            f"temperature={temperature} must be at least 0; 0 picks the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} must be at least 1; omit it to sample from all tokens")


def continued(
    next_logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue `tokens`, (B, T) with T of at least 1, by `length` tokens to (B, T + length).

    Args:
        next_logits: of tokens, (B, T), the logits of the next one, (B, V).
        tokens: to continue.
        length: tokens to add.
        temperature: divides the logits; 0 picks the most likely token.
        top_k: sample from the k most likely tokens; None: from all.
        generator: of random numbers, on the device of the tokens.

    Raises:
        UserError: T is 0, `temperature` is negative or not finite, or `top_k` is below 1.
        RunError: logits are infinite or not numbers.
    """
    check_sampling(tokens, temperature, top_k)
    tokens = tokens.long()
    finite = torch.ones((), dtype=torch.bool, device=tokens.device)
    for _ in range(length):
        logits = next_logits(tokens)
        finite &= logits.isfinite().all()
        chosen = sample_tokens(logits.float(), temperature, top_k, generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    if not finite:  # asked once: the host of a GPU waits for the answer
        raise RunError(BROKEN)
    return tokens


@contextlib.contextmanager
def evaluating(model: nn.Module, operations: float) -> Iterator[None]:
    """Put a model in evaluation mode; a small one computes on one thread.

    Args:
        model: whose mode is restored at the end.
        operations: of a forward pass.
    """
    was_training = model.training
    threads = torch.get_num_threads()
    if operations < FEW_OPERATIONS:
        torch.set_num_threads(1)
    model.eval()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        model.train(was_training)


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


def prompt_of(windows: Windows, tokenizer: Tokenizer) -> str:
    """Return up to three words of a split's text; empty if it has no readable ones."""
    tokens, _ = read_windows(windows, [0])
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
