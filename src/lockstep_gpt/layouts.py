"""How transformers describes our models, and what it computes from their exports.

The modern GPT needs code of its own: of the architectures in transformers 5.23, Persimmon is
nearest to it, and lacks the learned share of the previous token, n-grams, and shared keys.

Letters in shapes: T tokens, C width, H heads, D = C / H, V vocabulary size.
"""

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lockstep.errors import UserError
from lockstep.hub import Layout, Weights, gpt2
from torch import Tensor

from lockstep_gpt.language_model import LanguageModel

PADDED = ("token_embedding.weight", "output.weight")  # they have more rows than the vocabulary
WIDTHS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd"}
MODERN_SHAPE = ("n_kv_head", "ngram_rows", "longest_ngram", "block_size")
HASH = (36_313, 27_191)  # in an n-gram's hash: of the preceding tokens, of a token
GPT2_NAMES = {  # our modules -> theirs
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
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


def layout_of(model: LanguageModel, why: str) -> Layout:
    """Return the layout of one of our models.

    Raises:
        UserError: there is none; the message starts with `why`.
    """
    kind = type(model).__name__
    if kind not in LAYOUTS:
        raise UserError(
            f"{why}: {kind} is not one of {', '.join(LAYOUTS)}, which transformers can load; "
            "describe it in layouts.py"
        )
    return LAYOUTS[kind]


def gpt2_place(ours: str) -> tuple[str, bool]:
    """Return GPT-2's name of one of our weights, and whether the matrix is transposed there."""
    module, kind = ours.rsplit(".", 1)
    prefix = ""
    if module.startswith("blocks."):
        _, block, module = module.split(".", 2)
        prefix = f"transformer.h.{block}."
    if module not in GPT2_NAMES:
        raise UserError(f"{ours} does not exist in GPT-2; describe the model in layouts.py")
    is_linear = bool(prefix) and not module.endswith("norm")
    # GPT-2's matrices are (inputs, outputs).
    return f"{prefix}{GPT2_NAMES[module]}.{kind}", is_linear and kind == "weight"


def about_gpt2(model: LanguageModel) -> dict[str, Any]:
    """Return what config.json says of GPT-2 besides its shape."""
    share = model.dropout.p
    return {
        "architectures": ["GPT2LMHeadModel"],
        **GPT2_COMPUTES,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), share),
    }


def about_modern(model: LanguageModel) -> dict[str, Any]:
    """Return what config.json says of the modern GPT besides its shape."""
    code = importlib.import_module(type(model).__module__)
    file, name = "modeling_modern", "ModernGPTForCausalLM"
    return {
        "architectures": [name],
        "auto_map": {
            "AutoConfig": f"{file}.ModernGPTConfig",
            "AutoModelForCausalLM": f"{file}.{name}",
        },
        "rotary_base": code.ROTARY_BASE,
        "attention_scale": code.ATTENTION_SCALE,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def modern_logits(tokens: Tensor, config: dict[str, Any], weights: Weights) -> Tensor:
    """Return the logits, (T, V), of modeling_modern.py; modern.py names the papers."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def heads(x: Tensor, name: str) -> Tensor:
        width = config["n_embd"] // config["n_head"]
        y = linear(x, name).view(len(x), -1, width).transpose(0, 1)  # (heads, T, D)
        return y.repeat_interleave(config["n_head"] // len(y), dim=0)

    x = weights["token_embedding.weight"][tokens]  # (T, C)
    code = tokens * HASH[1]
    for table in range(config["longest_ngram"] - 1 if config["ngram_rows"] else 0):
        code = F.pad(code[:-1], (1, 0)) * HASH[0] ^ tokens * HASH[1]
        rows = code % config["ngram_rows"] + table * config["ngram_rows"]
        x = x + weights["ngram_embedding.weight"][rows]
    x = normalized(x)
    x = x + weights["previous"] * F.pad(x[:-1], (0, 0, 1, 0))
    for layer in range(config["n_layer"]):
        block = f"blocks.{layer}"
        y = normalized(x)
        q, k = (
            rotated(normalized(heads(y, f"{block}.attention.{name}")), config["rotary_base"])
            for name in ("query", "key")
        )
        v = heads(y, f"{block}.attention.value")
        y = gpt2.attention(q, k, v, config["attention_scale"])
        x = x + linear(y, f"{block}.attention.projection")
        hidden = F.relu(linear(normalized(x), f"{block}.mlp.expansion")).square()
        x = x + linear(hidden, f"{block}.mlp.projection")
    return linear(normalized(x), "output")


def normalized(x: Tensor) -> Tensor:
    """Return `x` with mean 0 and variance 1 in its last dimension (Ba et al. 2016)."""
    return F.layer_norm(x, x.shape[-1:])


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of `x`, (H, T, D), by Su et al. 2021, section 3.2.2."""
    T, D = x.shape[1:]
    angles = torch.outer(torch.arange(T).float(), base ** (-torch.arange(0, D, 2) / D))
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


LAYOUTS = {  # by the model's class
    "GPT": Layout(
        model_type="gpt2",
        about=about_gpt2,
        names={**WIDTHS, "n_positions": "block_size"},
        place=gpt2_place,
        computes=tuple(GPT2_COMPUTES),
        formula=gpt2.logits_of,
        written="GPT-2",
        remedy="if GPT-2 in transformers has a setting for your edit, such as activation_function, "
        "change it in GPT2_COMPUTES of layouts.py; if not, export code of your own, as modern does",
        padded=PADDED,
        positions="position_embedding.weight",
        completed=gpt2.with_biases,
        cleaned=gpt2.named_alike,
    ),
    "ModernGPT": Layout(
        model_type="modern_gpt",
        about=about_modern,
        names={**WIDTHS, **{name: name for name in MODERN_SHAPE}},
        place=lambda ours: (ours, False),
        computes=("rotary_base", "attention_scale"),
        formula=modern_logits,
        written="modeling_modern.py",
        remedy="make your edit of modern.py in modeling_modern.py and layouts.py too",
        code=Path(__file__).with_name("modeling_modern.py"),
        padded=PADDED,
    ),
}
