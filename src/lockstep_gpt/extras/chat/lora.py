"""Adapters of low rank (Hu et al. 2021): only they are trained and saved, not the weights.

A layer's weight W becomes W + alpha / rank * up @ down, of which `down` begins as noise and `up` as
zero. It stays a weight, so each model computes with it in its own way. The special tokens of a chat
also get their own rows, added to the embedding and to the head: the initial weights hardly know
these tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep_gpt.config import UserError
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.extras.chat.template import OURS, markers_of
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.registry import asked

DIGEST = "base_sha256"  # in checkpoints: which weights the adapters belong to


class Adapted(nn.Module):
    """A layer whose `weight` is its frozen `base` plus what is trained."""

    base: Tensor
    _kept: tuple[Any, Tensor] | None = None

    def added(self) -> Tensor:
        """Return `base` with what is trained, of the same shape."""
        raise NotImplementedError

    def current(self) -> Tensor:
        """Return the sum; without gradients, it is computed only once for the same adapters."""
        if torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            self._kept = None
            return self.added()
        key = [_state(each) for each in self.parameters(recurse=False)]
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self.added()
        return self._kept[1]

    weight: Any = property(current)


def _state(weight: Tensor) -> tuple[Any, ...]:
    """Return what differs once a weight was changed or moved."""
    changes = 0 if weight.is_inference() else weight._version  # which it doesn't count
    return weight.data_ptr(), weight.dtype, changes


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer with an adapter."""

    up: Tensor  # (outputs, rank)
    down: Tensor  # (rank, inputs)
    scale: float

    def added(self) -> Tensor:
        """Return `base` + scale * up @ down, (outputs, inputs)."""
        return torch.addmm(self.base, self.up, self.down, alpha=self.scale)


class _WithRows(Adapted):
    """A table whose rows of some tokens are trained."""

    rows: Tensor  # what is added to them
    tokens: Tensor  # which

    def added(self) -> Tensor:
        return self.base.index_add(0, self.tokens, self.rows)


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


def _freeze(layer: nn.Module, kind: Any) -> Tensor:
    """Make a layer one of `kind` whose base is its weight; return that."""
    base = layer._parameters.pop("weight")
    assert base is not None
    layer.__class__ = kind
    layer.register_parameter("base", base)
    return base


def _add_adapter(layer: nn.Linear, config: Any) -> None:
    rank = config.lora_rank
    base = _freeze(layer, AdaptedLinear)
    down, up = base.new_empty(rank, layer.in_features), base.new_zeros(layer.out_features, rank)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))  # as PEFT does
    layer.down, layer.up = nn.Parameter(down), nn.Parameter(up)
    layer.scale = (config.lora_alpha or 2 * rank) / rank


def _add_rows(model: GPT, tokenizer: Tokenizer) -> None:
    """Train the special tokens' rows of the embedding, and of a separate head."""
    found = markers_of(tokenizer)
    tokens = [found[marker] for marker in OURS if marker in found]
    for layer in filter(None, (model.token_embedding, getattr(model, "output", None))):
        if tokens:
            is_head = isinstance(layer, nn.Linear)
            base = _freeze(layer, HeadWithRows if is_head else EmbeddingWithRows)
            layer.register_buffer("tokens", torch.tensor(tokens), persistent=False)
            layer.rows = nn.Parameter(base.new_zeros(len(tokens), base.shape[1]))


def merge(model: GPT) -> None:
    """Turn a model with adapters into a plain one with the same weights."""
    adapted: list[Any] = [each for each in model.modules() if isinstance(each, Adapted)]
    for layer in adapted:
        weight = layer.added().detach()
        for name in ("base", "up", "down", "rows"):
            layer._parameters.pop(name, None)
        layer._buffers.pop("tokens", None)
        layer._non_persistent_buffers_set.discard("tokens")
        layer.__class__ = nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear
        layer.weight = nn.Parameter(weight)
    if adapted:
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
