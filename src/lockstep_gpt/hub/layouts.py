"""Converts the names and shapes of weights between our models and transformers.

Letters in shapes: V vocabulary size, C width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lockstep.errors import UserError
from torch import Tensor

from lockstep_gpt.hub.expected_logits import GPT2_CHECK, MODERN_CHECK, Check
from lockstep_gpt.initial_weights import POSITIONS
from lockstep_gpt.language_model import LanguageModel

Weights = dict[str, Tensor]
PADDED = ("token_embedding.weight", "output.weight")  # they have more rows than the vocabulary


@dataclass(frozen=True)
class Layout:
    """How transformers describes one architecture.

    Args:
        model_type: its name there.
        about: our model -> what config.json contains in addition to the shape.
        names: setting in config.json -> our setting, for the shape.
        place: our name of a weight -> its name there, and whether the matrix is transposed there.
        computes: settings in config.json, other than the shape, that must be as in `about`.
        code: the file in this folder that transformers needs to load the model.
        check: compares an export's logits with the model's; None: nothing does.
    """

    model_type: str
    about: Callable[[LanguageModel], dict[str, Any]]
    names: dict[str, str]
    place: Callable[[str], tuple[str, bool]]
    computes: tuple[str, ...]
    code: str | None = None
    check: Check | None = None

    def settings(self, model: LanguageModel) -> dict[str, Any]:
        """Return the content of config.json for `model`."""
        shape = {theirs: getattr(model, ours) for theirs, ours in self.names.items()}
        known = {"model_type": self.model_type, "vocab_size": model.vocab_size, "dtype": "float32"}
        return {**known, **shape, **self.about(model)}


def layout_of(model: LanguageModel, why: str) -> Layout:
    """Return the layout of one of our models.

    Raises:
        UserError: there is none; the message starts with `why`.
    """
    kind = type(model).__name__
    if kind not in LAYOUTS:
        raise UserError(
            f"{why}: {kind} is not one of {', '.join(LAYOUTS)}, which transformers can load; "
            "describe it in extras/hub/layouts.py"
        )
    return LAYOUTS[kind]


def export_weights(model: LanguageModel, layout: Layout) -> Weights:
    """Return the weights of `model` with the names and shapes of transformers."""
    weights = {}
    for ours, padded in model.state_dict().items():
        theirs, turned = layout.place(ours)
        weight = padded[: model.vocab_size] if ours in PADDED else padded
        if turned:
            weight = weight.T
        # Cloned: safetensors rejects tensors that share memory.
        weights[theirs] = weight.clone(memory_format=torch.contiguous_format)
    if layout is LAYOUTS["GPT"] and not getattr(model, "bias", False):
        weights |= _without_effect(weights)
    return weights


def _without_effect(weights: Weights) -> Weights:
    """Return zeros for the biases that GPT-2 always has."""
    return {
        name.replace(".weight", ".bias"): torch.zeros(weight.shape[-1])
        for name, weight in weights.items()
        if not name.startswith(("transformer.wte", "transformer.wpe"))
    }


def import_weights(
    saved: Mapping[str, Tensor], model: LanguageModel, layout: Layout, source: str
) -> Weights:
    """Return weights from transformers with our names and the shapes of `model`.

    Positions beyond the context are dropped; rows that pad the vocabulary are zero.

    Raises:
        UserError: one is missing, left over, or misshapen; the message starts with `source`.
    """
    left = _named_alike(saved)
    weights = {}
    for ours, place in model.state_dict().items():
        theirs, turned = layout.place(ours)
        if theirs not in left:
            raise UserError(f"{source} lacks the weight {theirs}; choose a complete folder")
        weight = left.pop(theirs)
        if turned:
            weight = weight.T
        if ours == POSITIONS:
            weight = weight[: len(place)]
        if ours in PADDED and len(weight) == model.vocab_size:
            weight = F.pad(weight, (0, 0, 0, len(place) - len(weight)))
        weights[ours] = weight
        if weights[ours].shape != place.shape:
            raise UserError(
                f"{source} has {theirs} of shape {tuple(weight.shape)}, not "
                f"{tuple(place.shape)}; set model.* as in its config.json"
            )
    _refuse_left_over(left, source)
    return weights


def _named_alike(saved: Mapping[str, Tensor]) -> Weights:
    """Add the prefix that some folders omit, and drop GPT-2's causal masks and tied head."""
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


def _refuse_left_over(left: Weights, source: str) -> None:
    for name, weight in sorted(left.items(), key=lambda item: item[0].endswith(".bias")):
        if not name.endswith(".bias"):
            raise UserError(
                f"{source} has the weight {name}, which the model lacks; choose another folder"
            )
        if weight.any():
            raise UserError(f"{source} has biases, such as {name}; set model.bias=true")


GPT2_OUTER = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
}
GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.expansion": "mlp.c_fc",
    "mlp.projection": "mlp.c_proj",
}


GPT2_COMPUTES = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def _gpt2_place(ours: str) -> tuple[str, bool]:
    module, kind = ours.rsplit(".", 1)
    if module in GPT2_OUTER:
        return f"{GPT2_OUTER[module]}.{kind}", False
    *_, block, module = ("", *module.split(".", 2))[-3:]
    if module not in GPT2_BLOCK:
        raise UserError(
            f"{ours} does not exist in GPT-2; describe the model in extras/hub/layouts.py"
        )
    turned = kind == "weight" and not module.endswith("norm")  # its matrices are (inputs, outputs)
    return f"transformer.h.{block}.{GPT2_BLOCK[module]}.{kind}", turned


def _about_gpt2(model: LanguageModel) -> dict[str, Any]:
    share = model.dropout.p
    return {
        "architectures": ["GPT2LMHeadModel"],
        **GPT2_COMPUTES,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), share),
    }


def _about_modern(model: LanguageModel) -> dict[str, Any]:
    module = importlib.import_module(type(model).__module__)
    file = "modeling_modern"
    name = "ModernGPTForCausalLM"
    return {
        "architectures": [name],
        "auto_map": {
            "AutoConfig": f"{file}.ModernGPTConfig",
            "AutoModelForCausalLM": f"{file}.{name}",
        },
        "rotary_base": module.ROTARY_BASE,
        "attention_scale": module.ATTENTION_SCALE,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


WIDTHS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd"}
MODERN_SHAPE = ("n_kv_head", "ngram_rows", "longest_ngram", "block_size")
LAYOUTS = {  # by the model's class
    "GPT": Layout(
        "gpt2",
        _about_gpt2,
        {**WIDTHS, "n_positions": "block_size"},
        _gpt2_place,
        tuple(GPT2_COMPUTES),
        check=GPT2_CHECK,
    ),
    "ModernGPT": Layout(
        "modern_gpt",
        _about_modern,
        {**WIDTHS, **{name: name for name in MODERN_SHAPE}},
        lambda ours: (ours, False),
        ("rotary_base", "attention_scale"),
        "modeling_modern.py",
        MODERN_CHECK,
    ),
}
