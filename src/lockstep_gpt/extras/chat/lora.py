"""Adapters of low rank (Hu et al. 2021): only they are trained and saved, not the weights.

A layer's weight W acts as W + alpha / rank * up @ down, of which `down` begins as noise and `up` as
zero. The special tokens of a chat also get their own rows, added to the embedding and to the head:
the initial weights hardly know these tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep_gpt.config import Config
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.lora_settings import LoraSettings
from lockstep_gpt.extras.chat.template import (
    BEGIN_OF_MESSAGE,
    END_OF_MESSAGE,
    OURS,
    markers_of,
)
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.training.initial_weights import load_initial_weights

DIGEST = "base_sha256"  # in checkpoints: which weights the adapters belong to


class AdaptedLinear(nn.Module):
    """A linear layer with a frozen weight and an adapter.

    Args:
        layer: the layer, whose parameters it takes over.
        rank: of the adapter.
        scale: of the adapter's output.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        down = layer.weight.new_empty(rank, layer.in_features)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))  # as PEFT does
        self.weight = layer.weight
        self.bias: nn.Parameter | None = layer.bias
        self.down = nn.Parameter(down)  # (rank, inputs)
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))  # (outputs, rank)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (..., outputs), for `x`, (..., inputs)."""
        return self.together(x, [self])

    def plain(self) -> nn.Module:
        """Return an ordinary layer with the sum of weight and adapter."""
        with torch.no_grad():
            self.weight.addmm_(self.up, self.down, alpha=self.scale)
        return plain_linear(self.weight, self.bias)

    @staticmethod
    def together(x: Tensor, layers: Sequence[AdaptedLinear]) -> Tensor:
        """Return all layers' outputs for `x`, (..., inputs), concatenated: few large products.

        Each is x W^T + scale * (x down^T) up^T. Added to W, an adapter would need the gradient of
        all of W. Only one layer alone may have a bias.
        """
        weight: Tensor = layers[0].weight
        if len(layers) > 1:
            weight = torch.cat([layer.weight for layer in layers])
        down = torch.cat([layer.down for layer in layers])
        up: Tensor = torch.block_diag(*(layer.up for layer in layers))  # type: ignore[no-untyped-call]
        flat = x.flatten(0, -2)
        y = F.linear(flat, weight.to(x.dtype), layers[0].bias)
        low = F.linear(flat, down.to(x.dtype))  # (..., rank of all)
        y = torch.addmm(y, low, up.to(low.dtype).T, alpha=layers[0].scale)
        return y.view(*x.shape[:-1], -1)


class EmbeddingWithRows(nn.Module):
    """An embedding of which some tokens' rows are trained; its `weight` is the sum."""

    tokens: Tensor  # which

    def __init__(self, base: nn.Parameter, tokens: list[int]) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("tokens", torch.tensor(tokens), persistent=False)
        self.rows = nn.Parameter(base.new_zeros(len(tokens), base.shape[1]))

    @property
    def weight(self) -> Tensor:
        """The whole table, (V, C)."""
        return self.base.index_add(0, self.tokens, self.rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of `tokens`, (..., C)."""
        return F.embedding(tokens, self.weight)

    def plain(self) -> nn.Module:
        """Return an ordinary embedding with the same weight."""
        rows, width = self.weight.shape
        embedding = nn.Embedding(rows, width, device="meta")  # draws no random numbers
        embedding.weight = nn.Parameter(self.weight.detach())
        return embedding


class HeadWithRows(EmbeddingWithRows):
    """A separate head of which some tokens' rows are trained."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (..., V), of features, (..., C)."""
        return F.linear(x, self.weight)

    def plain(self) -> nn.Module:
        """Return an ordinary head with the same weight."""
        return plain_linear(nn.Parameter(self.weight.detach()), None)


def plain_linear(weight: Any, bias: nn.Parameter | None) -> nn.Linear:
    """Return a linear layer with these parameters, without drawing random numbers."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def adapt(model: GPT, config: Config, tokenizer: Tokenizer) -> Callable[[], None] | None:
    """Load the initial weights of `model` and give it adapters, if `lora.rank` is set.

    Returns what merges the adapters into the weights.
    """
    lora = LoraSettings.of(config)
    if lora.rank is None:
        return None
    load_initial_weights(model, tokenizer)
    model.config = replace(model.config, init_from=None)  # they are loaded
    model.requires_grad_(False)
    digest = _digest(model)
    for parent in [*model.blocks.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, AdaptedLinear(layer, lora.rank, lora.scale))
    _add_rows(model, tokenizer)
    hooks: Any = model  # torch declares no types for these
    hooks.base_sha256 = digest  # not a buffer: DDP would broadcast all buffers in each step
    hooks.register_state_dict_post_hook(_leave_out_base)
    hooks.register_load_state_dict_pre_hook(_check_base)
    hooks.register_load_state_dict_post_hook(_expect_no_base)
    return partial(merge, model)


def _add_rows(model: GPT, tokenizer: Tokenizer) -> None:
    """Train the special tokens' rows of the embedding, and of a separate head."""
    ids = markers_of(tokenizer)
    markers = (*OURS, BEGIN_OF_MESSAGE, END_OF_MESSAGE)
    tokens = [ids[marker] for marker in markers if marker in ids]
    if not tokens:
        return
    places: Any = model
    places.token_embedding = EmbeddingWithRows(places.token_embedding.weight, tokens)
    if hasattr(model, "output"):
        places.output = HeadWithRows(places.output.weight, tokens)


@torch.no_grad()
def merge(model: GPT) -> None:
    """Turn a model with adapters into a plain one with the same weights."""
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, AdaptedLinear | EmbeddingWithRows):
                setattr(parent, name, layer.plain())
    model.requires_grad_()  # so the hooks do nothing


def _digest(model: GPT) -> Tensor:
    """Return the SHA-256 of all weights, as 32 bytes."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().cpu().contiguous().numpy().data)
    return torch.tensor([*digest.digest()], dtype=torch.uint8)


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _leave_out_base(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    names = _frozen(model)
    for name in names:
        state.pop(prefix + name, None)
    if names:
        state[prefix + DIGEST] = model.base_sha256


def _expect_no_base(model: nn.Module, problems: Any) -> None:
    endings = tuple(f".{name}" for name in _frozen(model))
    missing = [key for key in problems.missing_keys if not f".{key}".endswith(endings)]
    problems.missing_keys[:] = missing


def _check_base(
    model: Any,
    state: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    if not _frozen(model):
        return
    saved = state.pop(prefix + DIGEST, None)
    if saved is None:
        missing_keys.append(prefix + DIGEST)
    elif not torch.equal(saved.cpu(), model.base_sha256):
        raise UserError(
            "the adapters belong to other weights than model.init_from has now; restore "
            "those weights"
        )
