"""What our models share: from features to logits, the loss, and further tokens.

In shapes: B samples, T tokens, C width, V vocabulary size.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from lockstep.errors import RunError, UserError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep import functional
from lockstep_gpt.sampling import BROKEN, check_sampling, sample_tokens
from lockstep_gpt.shape import VOCAB_MULTIPLE, check_shape

FEW_OPERATIONS = 1 << 30  # of a forward pass; with fewer, threads mostly wait for each other


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
        check_sampling(tokens, temperature, top_k)
        was_training = self.training
        threads = torch.get_num_threads()
        if len(tokens) * self.block_size * self.flops_per_token < 3 * FEW_OPERATIONS:
            torch.set_num_threads(1)
        self.eval()
        tokens = tokens.long()
        finite = torch.ones((), dtype=torch.bool, device=tokens.device)
        for _ in range(length):  # not `self(...)`, which would be recompiled for each T
            last = self.features(tokens[:, -self.block_size :])[:, -1]  # (B, C)
            logits = functional.project_to_vocabulary(last, self.head, self.vocab_size)
            finite &= logits.isfinite().all()
            chosen = sample_tokens(logits.float(), temperature, top_k, generator)
            tokens = torch.cat([tokens, chosen], dim=1)
        torch.set_num_threads(threads)
        self.train(was_training)
        if not finite:  # asked once: the host of a GPU waits for the answer
            raise RunError(BROKEN)
        return tokens

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
