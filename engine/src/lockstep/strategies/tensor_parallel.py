"""Tensor parallelism: each rank computes some heads, a part of each MLP, and of the vocabulary.

The ranks of a group have the same samples. A block's first layers are split by outputs, its last
ones by inputs, so their outputs are added over ranks: once after attention and once after the MLP,
and in backward once before each (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.batch import either
from lockstep.functional import causal_attention, causal_shares, with_heads_of
from lockstep.settings import check
from lockstep.strategies.tensor_splits import SPLITS, Split, TensorRanks
from lockstep.strategies.tensor_sums import narrowed, sum_gradients, sum_outputs
from lockstep.strategies.vocabulary_loss import split_cross_entropy, split_logits


def refuse_unsplittable(model: Any, parts: int, device: torch.device) -> None:
    """Raise a `UserError` for a model that so many ranks can't split as one device computes it.

    Args:
        model: has `blocks` with the layers that this module knows.
        parts: the number of ranks.
        device: where they compute.
    """
    setting = "strategy.tensor_parallel"
    names = ("n_head", "padded_vocab_size", "blocks", "head", "dropout")
    fits = all(hasattr(model, name) for name in names)
    kind = type(model).__name__
    check(setting, parts, fits, f"splits this project's GPTs, and no {kind}; set it to 1")
    for name, layer in model.blocks.named_modules():
        fits = not isinstance(layer, nn.Linear) or name.rpartition(".")[2] in LAYERS
        rule = f"can't split {name}, a layer that only {kind} has; set it to 1"
        check(setting, parts, fits, rule)
    counts = {
        f"model.{name}={count}": count
        for name in ("n_head", "n_kv_head", "ngram_rows")
        if (count := getattr(model, name, None)) is not None
    }
    counts[f"a vocabulary of {model.padded_vocab_size:,}"] = model.padded_vocab_size
    largest = math.gcd(*counts.values())
    possible = [size for size in range(1, largest + 1) if largest % size == 0]
    for name, count in counts.items():
        rule = f"does not divide {name}; use {either(possible)}"
        check(setting, parts, count % parts == 0, rule)
    # Kernels of GPUs draw attention's noise themselves, by the number of a head on its device.
    dropout = model.dropout.p
    rule = f"differs from one device's on GPUs with {setting}={parts}; set it to 0"
    check("model.dropout", dropout, not dropout or device.type != "cuda", rule)


def split_model(model: Any, ranks: TensorRanks) -> None:
    """Keep only this rank's part of a whole model, in place.

    The names of its parameters stay. `loss` and `logits` return what those of a whole model do.
    """
    for name, layer in [*model.named_modules()]:
        parent, _, kind = name.rpartition(".")
        if kind in SPLITS:
            part = LAYERS[kind](layer, SPLITS[kind], ranks)
            setattr(model.get_submodule(parent), kind, part)
    for block in model.blocks:
        attention = block.attention
        if model.dropout.p:
            attention.attend = functools.partial(attend_with_shared_noise, ranks)
        attention.n_head //= ranks.size
        if hasattr(attention, "n_kv_head"):
            attention.n_kv_head //= ranks.size
    model.loss = functools.partial(loss_of_part, model, ranks)
    model.logits = functools.partial(logits_of_parts, model, ranks)


class LinearOutputs(nn.Module):
    """A linear layer of which each rank computes some outputs.

    Args:
        layer: the whole layer.
        split: how its weight is split.
        ranks: the group.
    """

    def __init__(self, layer: nn.Linear, split: Split, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = parameter_part(layer.weight, split, ranks)  # (outputs / ranks, inputs)
        self.bias = None
        if layer.bias is not None:
            self.bias = parameter_part(layer.bias, split, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, (..., outputs / ranks), for `x`, (..., inputs)."""
        return F.linear(sum_gradients(narrowed(x), self.ranks), self.weight, self.bias)

    @staticmethod
    def together(x: Tensor, layers: Sequence[LinearOutputs]) -> Tensor:
        """Return this rank's outputs of layers without biases, concatenated, from one product."""
        weight: Tensor = layers[0].weight
        if len(layers) > 1:
            weight = torch.cat([layer.weight for layer in layers])
        return F.linear(sum_gradients(x, layers[0].ranks), weight.to(x.dtype))


class LinearInputs(nn.Module):
    """A linear layer of which each rank has some inputs; the outputs are added over ranks."""

    def __init__(self, layer: nn.Linear, split: Split, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = parameter_part(layer.weight, split, ranks)  # (outputs, inputs / ranks)
        self.bias: nn.Parameter | None = layer.bias  # whole

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs, (..., outputs), for this rank's `x`, (..., inputs / ranks)."""
        y = sum_outputs(F.linear(x, self.weight), self.ranks)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @staticmethod
    def together(x: Tensor, layers: Sequence[LinearInputs]) -> Tensor:
        """Return the outputs of the only layer, without a bias, in the type of `x`."""
        (layer,) = layers
        return sum_outputs(F.linear(x, layer.weight.to(x.dtype)), layer.ranks)


class EmbeddingRows(nn.Module):
    """An embedding of which each rank has some rows."""

    def __init__(self, layer: nn.Embedding, split: Split, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = parameter_part(layer.weight, split, ranks)  # (rows / ranks, C)
        self.first = ranks.rank * (layer.num_embeddings // ranks.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of `tokens`, (..., C), also those of other ranks."""
        rows = tokens - self.first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        x = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return sum_outputs(x.masked_fill(elsewhere[..., None], 0), self.ranks)


class HeadRows(nn.Module):
    """The weight of a separate head, of which each rank has the rows of some tokens."""

    def __init__(self, layer: nn.Linear, split: Split, ranks: TensorRanks) -> None:
        super().__init__()
        self.weight = parameter_part(layer.weight, split, ranks)  # (V padded / ranks, C)


LAYERS: dict[str, Any] = {
    "token_embedding": EmbeddingRows,
    "ngram_embedding": EmbeddingRows,
    "output": HeadRows,
    "qkv": LinearOutputs,
    "query": LinearOutputs,
    "key": LinearOutputs,
    "value": LinearOutputs,
    "expansion": LinearOutputs,
    "projection": LinearInputs,
}


def parameter_part(whole: Tensor, split: Split, ranks: TensorRanks) -> nn.Parameter:
    """Return this rank's part of a parameter."""
    return nn.Parameter(split.part(whole.detach(), ranks), whole.requires_grad)


def attend_with_shared_noise(
    ranks: TensorRanks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    scale: float | None = None,
) -> Tensor:
    """Attend with this rank's heads, and drop out what one device would for them, on a CPU.

    Each rank draws the noise of all heads: then the generators of all ranks also stay equal, and
    with them the noise that follows. Shapes are as in `functional.causal_attention`.
    """
    if not dropout:
        return causal_attention(q, k, v, 0.0, scale)
    k, v, _ = with_heads_of(q, k, v)  # on a CPU, never shared
    B, heads, T, D = q.shape
    shares = causal_shares(q, k, scale)
    noise = F.dropout(shares.new_ones(B * heads * ranks.size, T, T), dropout)
    part = noise.view(B, -1, T, T).chunk(ranks.size, dim=1)[ranks.rank]
    return ((shares * part.reshape(-1, T, T)) @ v.reshape(-1, T, D)).view(q.shape)


def loss_of_part(model: Any, ranks: TensorRanks, features: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a split model, as `GPT.loss` does."""
    return split_cross_entropy(features, model.head, model.vocab_size, targets, ranks)


def logits_of_parts(model: Any, ranks: TensorRanks, features: Tensor) -> Tensor:
    """Return all logits of a split model, as `GPT.logits` does; no gradients flow back."""
    return split_logits(features, model.head, model.vocab_size, ranks)
