"""What our models share: from features to logits, the loss, and further tokens.

In shapes: B samples, T tokens, C width, V vocabulary size.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from lockstep import functional
from lockstep.errors import UserError
from lockstep.settings import check, check_number, check_switch, check_whole
from lockstep.tokens import check_sampling, continued, evaluating
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB_MULTIPLE = 64  # matrix products are fast at sizes that tensor cores divide evenly
MOST_LAYERS = 10_000


class LanguageModel(nn.Module):
    """A decoder-only transformer; a subclass creates its layers, and defines two methods.

    Args:
        vocab_size: V, from the data's tokenizer.
        block_size: tokens of context, the largest T.
        n_layer: number of blocks.
        n_head: attention heads per block.
        n_embd: width of the residual stream, C.
        dropout: probability that an element is dropped.

    Raises:
        UserError: a size is too small, or the heads don't divide the width evenly.
    """

    token_embedding: nn.Embedding
    blocks: nn.ModuleList

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        dropout: float,
    ) -> None:
        super().__init__()
        check_shape(vocab_size, block_size, n_layer, n_head, n_embd, dropout)
        self.vocab_size = vocab_size
        self.padded_vocab_size = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.block_size = block_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_embd = n_embd
        self.dropout = nn.Dropout(dropout)

    @property
    def head(self) -> Tensor:
        """Weights that turn features into logits, (V padded, C)."""
        raise NotImplementedError

    def features(self, tokens: Tensor) -> Tensor:
        """Return the head's input, (B, T, C), for `tokens`, (B, T)."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the token after each of `tokens`, (B, T) of any integer type.

        Returns the logits, (B, T, V). With `targets`, (B, T), returns the mean cross-entropy in
        nats over targets that are not `IGNORE`, at least float32.

        Raises:
            UserError: T is larger than `block_size`.
        """
        features = self.features(tokens)
        if targets is None:
            return self.logits(features)
        return self.loss(features, targets)

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `features`, (B, T, C), at `targets`, (B, T), in nats."""
        return functional.linear_cross_entropy(features, self.head, self.vocab_size, targets)

    def logits(self, features: Tensor) -> Tensor:
        """Turn features, (..., C), into logits, (..., V), also outside of autocast."""
        features = features.to(self.head.dtype)
        return functional.project_to_vocabulary(features, self.head, self.vocab_size)

    def positions(self, tokens: Tensor) -> Any:
        """Return the index of each token's position; a `UserError` if T exceeds `block_size`."""
        T = tokens.shape[1]
        if self.block_size < T:
            raise UserError(
                f"{T} tokens are more than model.block_size={self.block_size}; "
                "shorten the input or train with a larger block_size"
            )
        return slice(T)

    @torch.inference_mode()
    def generate(
        self,
        tokens: Tensor,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `tokens`, (B, T) with T of at least 1, by `length` tokens to (B, T + length).

        The model reads the last `block_size` tokens. `temperature` divides the logits; 0 picks the
        most likely token. `top_k` samples from the k most likely tokens, None from all. `generator`
        must be on the model's device. Raises a `UserError` if T is 0, `temperature` is negative or
        not finite, or `top_k` is below 1, and a `RunError` if logits are infinite or not numbers.
        """

        def next_logits(tokens: Tensor) -> Tensor:  # not `self(...)`, recompiled for each T
            last = self.features(tokens[:, -self.block_size :])[:, -1]  # (B, C)
            return functional.project_to_vocabulary(last, self.head, self.vocab_size)

        check_sampling(tokens, temperature, top_k)
        operations = len(tokens) * self.block_size * self.flops_per_token / 3
        with evaluating(self, operations):
            return continued(next_logits, tokens, length, temperature, top_k, generator)

    @property
    def num_parameters(self) -> int:
        """Total parameters without padding rows; a tied head counts once."""
        tables = len({id(self.token_embedding.weight), id(self.head)})
        padding = tables * (self.padded_vocab_size - self.vocab_size) * self.n_embd
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations per token in forward and backward at T = `block_size`.

        6 per matrix weight, including the head (Kaplan et al. 2020, section 2.1), and 6 C T per
        layer for attention: half of 12 C T, because of the causal mask. PaLM's appendix B
        (Chowdhery et al. 2022) and nanoGPT count all of it, so their MFU is higher.
        """
        matrices = sum(weight.numel() for weight in self.blocks.parameters() if weight.ndim == 2)
        head = self.vocab_size * self.n_embd
        return 6 * (matrices + head) + 6 * self.n_layer * self.n_embd * self.block_size


def recompute_in_backward(blocks: Iterable[nn.Module]) -> None:
    """Let each block keep only its input, and recompute the rest in backward (Chen et al. 2016).

    FSDP and torch.compile wrap the block from outside, so they see the usual class.
    """
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def check_shape(
    vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int, dropout: float
) -> None:
    """Raise a `UserError` for a shape that no model can have."""
    rule = "is not known; give the data module an attribute vocab_size"
    check("vocab_size", vocab_size, vocab_size is not None, rule)
    check_whole("vocab_size", vocab_size, at_least=1)
    check_whole("model.block_size", block_size, at_least=1)
    check_whole("model.n_layer", n_layer, at_least=1, at_most=MOST_LAYERS)
    check_whole("model.n_head", n_head, at_least=1)
    check_whole("model.n_embd", n_embd, at_least=1)
    check_number("model.dropout", dropout, at_least=0, below=1)
    check_heads(n_head, n_embd)


def check_switches(**switches: Any) -> None:
    """Raise a `UserError` for an argument of a model, by its name, that is not true or false."""
    for name, value in switches.items():
        check_switch(f"model.{name}", value)


def check_heads(n_head: int, n_embd: int, n_kv_head: int | None = None) -> None:
    """Raise a `UserError` unless heads divide the width evenly, and share keys and values evenly.

    Args:
        n_head: of queries.
        n_embd: the width that they divide.
        n_kv_head: of keys and values; None: as many as of queries.
    """
    if n_kv_head is not None:
        check_whole("model.n_kv_head", n_kv_head, at_least=1)
        rule = f"does not divide model.n_head={n_head}; set a divisor of it"
        check("model.n_kv_head", n_kv_head, n_head % n_kv_head == 0, rule)
    nearest = n_head * max(1, round(n_embd / n_head))
    rule = f"is not divisible by model.n_head={n_head}; nearest: model.n_embd={nearest}"
    check("model.n_embd", n_embd, n_embd % n_head == 0, rule)
