"""GPT-2 of transformers: what it computes from config.json and weights, and its files' quirks.

Letters in shapes: T tokens, C width, H heads, D = C / H, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UserError
from lockstep.hub.layout import Weights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by transformers' names
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def logits_of(tokens: Tensor, config: dict[str, Any], weights: Mapping[str, Tensor]) -> Tensor:
    """Return the logits, (T, V), of GPT-2 (Radford et al. 2019, section 2.3, and its code).

    GPT-2 is the decoder of Vaswani et al. 2017 with norms before each layer and after the last.
    Its matrices are (inputs, outputs). GELU is the approximation of Hendrycks and Gimpel 2016.
    """
    if config["activation_function"] not in ACTIVATIONS:
        raise UserError(
            f"activation_function={config['activation_function']} is not one of "
            f"{', '.join(ACTIVATIONS)}; add it to lockstep.hub.gpt2.ACTIVATIONS in layouts.py"
        )
    activation = ACTIVATIONS[config["activation_function"]]

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, scale.shape, scale, shift, config["layer_norm_epsilon"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    T = len(tokens)
    embedding = weights["transformer.wte.weight"]
    x = embedding[tokens] + weights["transformer.wpe.weight"][:T]  # (T, C)
    for layer in range(config["n_layer"]):
        block = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(T, 3, config["n_head"], -1).permute(1, 2, 0, 3)  # (H, T, D)
        scale = q.shape[-1] ** -0.5 if config["scale_attn_weights"] else 1.0
        if config["scale_attn_by_inverse_layer_idx"]:
            scale /= layer + 1
        x = x + linear(attention(q, k, v, scale), f"{block}.attn.c_proj")
        hidden = activation(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + linear(hidden, f"{block}.mlp.c_proj")
    head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
    return norm(x, "transformer.ln_f") @ head.T


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention of (H, T, D), concatenated to (T, C); Vaswani et al. 2017, eq. 1."""
    T = q.shape[1]
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    shares = (q @ k.mT * scale).masked_fill(later, -torch.inf).softmax(dim=-1)
    return (shares @ v).transpose(0, 1).flatten(1)


def with_biases(model: Any, weights: Weights) -> Weights:
    """Add zeros for the biases that GPT-2 always has, if a model has none."""
    if getattr(model, "bias", False):
        return weights
    zeros = {
        name.replace(".weight", ".bias"): torch.zeros(weight.shape[-1])
        for name, weight in weights.items()
        if not name.startswith(("transformer.wte", "transformer.wpe"))
    }
    return {**weights, **zeros}


def named_alike(saved: Mapping[str, Tensor]) -> Weights:
    """Add the prefix that some folders omit, and drop causal masks and a tied head."""
    prefix = "transformer." if "wte.weight" in saved else ""
    named = {}
    for name, weight in saved.items():
        is_head = name == "lm_head.weight"  # has no prefix in any folder
        named[name if is_head else f"{prefix}{name}"] = weight
    head = named.get("lm_head.weight")
    embedding = named.get("transformer.wte.weight")
    dropped = [".attn.bias", ".attn.masked_bias"]
    if head is not None and embedding is not None and torch.equal(head, embedding):
        dropped.append("lm_head.weight")
    endings = tuple(dropped)
    return {name: weight for name, weight in named.items() if not name.endswith(endings)}
