"""Adapters of low rank (Hu et al. 2021): only they are trained and saved, not the weights.

A layer's weight W acts as W + alpha / rank * up @ down, of which `down` begins as noise and `up` as
zero. The special tokens of a chat also get their own rows, added to the embedding and to the head:
the initial weights hardly know these tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep_gpt.config import UserError
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.extras.chat.template import (
    BEGIN_OF_MESSAGE,
    END_OF_MESSAGE,
    OURS,
    markers_of,
)
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.registry import asked

DIGEST = "base_sha256"  # in checkpoints: which weights the adapters belong to


class AdaptedLinear(nn.Linear):
    """A linear layer with a frozen weight and an adapter."""

    up: Tensor  # (outputs, rank)
    down: Tensor  # (rank, inputs)
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (..., outputs), for `x`, (..., inputs)."""
        return self.together(x, [self])

    @staticmethod
    def together(x: Tensor, layers: Sequence[AdaptedLinear]) -> Tensor:
        """Return all layers' outputs for `x`, (..., inputs), concatenated: few large products.

        Each is x W^T + scale * (x down^T) up^T. Added to W, an adapter would need the gradient of
        all of W. Only one layer alone may have a bias.
        """
        weights = [layer.weight for layer in layers]
        weight = torch.cat(weights) if weights[1:] else weights[0]
        down = torch.cat([layer.down for layer in layers])
        up: Tensor = torch.block_diag(*(each.up for each in layers))  # type: ignore[no-untyped-call]
        flat = x.flatten(0, -2)
        y = F.linear(flat, weight.to(x.dtype), layers[0].bias)
        low = F.linear(flat, down.to(x.dtype))  # (..., rank of all)
        y = torch.addmm(y, low, up.to(low.dtype).T, alpha=layers[0].scale)
        return y.view(*x.shape[:-1], -1)


class _WithRows(nn.Module):
    """A table whose rows of some tokens are trained; its `weight` is the sum."""

    base: Tensor
    rows: Tensor  # what is added to them
    tokens: Tensor  # which

    def _sum(self) -> Tensor:
        return self.base.index_add(0, self.tokens, self.rows)

    weight: Any = property(_sum)


class EmbeddingWithRows(_WithRows, nn.Embedding):
    """An embedding of which some rows are trained."""


class HeadWithRows(_WithRows, nn.Linear):
    """A separate head of which some rows are trained."""


def adapt(model: GPT, tokenizer: Tokenizer) -> None:
    """Load the initial weights of `model` and give it adapters, if `model.lora_rank` is set."""
    config: Any = model.config
    if not getattr(config, "lora_rank", None):
        return
    asked("INITIAL_WEIGHTS", model, tokenizer)
    model.config = replace(config, init_from=None)  # they are loaded
    model.requires_grad_(False)
    digest = _digest(model)
    for layer in _layers(model):
        _add_adapter(layer, config)
    _add_rows(model, tokenizer)
    model.register_buffer(DIGEST, digest)
    hooks: Any = model  # torch declares no types for these
    hooks.register_state_dict_post_hook(_leave_out_base)
    hooks.register_load_state_dict_pre_hook(_check_base)
    hooks.register_load_state_dict_post_hook(_expect_no_base)


def _layers(model: GPT) -> Iterator[nn.Linear]:
    return (each for each in model.blocks.modules() if isinstance(each, nn.Linear))


def _add_adapter(layer: Any, config: Any) -> None:
    rank, weight = config.lora_rank, layer.weight
    down, up = weight.new_empty(rank, layer.in_features), weight.new_zeros(layer.out_features, rank)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))  # as PEFT does
    layer.__class__ = AdaptedLinear
    layer.down, layer.up = nn.Parameter(down), nn.Parameter(up)
    layer.scale = (config.lora_alpha or 2 * rank) / rank


def _add_rows(model: GPT, tokenizer: Tokenizer) -> None:
    """Train the special tokens' rows of the embedding, and of a separate head."""
    found = markers_of(tokenizer)
    markers = (*OURS, BEGIN_OF_MESSAGE, END_OF_MESSAGE)
    tokens = [found[marker] for marker in markers if marker in found]
    tables: list[Any] = [model.token_embedding, getattr(model, "output", None)]
    for layer in filter(None, tables if tokens else ()):
        base = layer._parameters.pop("weight")
        layer.__class__ = HeadWithRows if isinstance(layer, nn.Linear) else EmbeddingWithRows
        layer.register_parameter("base", base)
        layer.register_buffer("tokens", torch.tensor(tokens), persistent=False)
        layer.rows = nn.Parameter(base.new_zeros(len(tokens), base.shape[1]))


@torch.no_grad()
def merge(model: GPT) -> None:
    """Turn a model with adapters into a plain one with the same weights."""
    if DIGEST not in model._buffers:
        return
    layer: Any
    for layer in [*model.modules()]:
        if hasattr(layer, "up"):
            layer.weight.addmm_(layer.up, layer.down, alpha=layer.scale)
            del layer.up, layer.down
            layer.__class__ = nn.Linear
        elif hasattr(layer, "rows"):
            weight = layer.weight
            del layer.base, layer.rows, layer.tokens
            layer.__class__ = nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear
            layer.weight = nn.Parameter(weight)
    del model._buffers[DIGEST]
    model.requires_grad_()  # so the hooks leave nothing out


def _digest(model: GPT) -> Tensor:
    """Return the SHA-256 of all weights, as 32 bytes."""
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().cpu().contiguous().numpy().data)
    return torch.tensor([*found.digest()], dtype=torch.uint8)


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if not each.requires_grad}


def _leave_out_base(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _frozen(model):
        state.pop(prefix + name, None)


def _expect_no_base(model: nn.Module, problems: Any) -> None:
    endings = tuple(f".{name}" for name in _frozen(model))
    missing = [key for key in problems.missing_keys if not f".{key}".endswith(endings)]
    problems.missing_keys[:] = missing


def _check_base(
    model: nn.Module, state: dict[str, Any], prefix: str, *_: Any, **_settings: Any
) -> None:
    saved = state.get(prefix + DIGEST)
    if saved is not None and not torch.equal(saved.cpu(), model.get_buffer(DIGEST).cpu()):
        raise UserError(
            "the adapters belong to other weights than model.init_from has now; put those back, or "
            "export the model before they change"
        )
