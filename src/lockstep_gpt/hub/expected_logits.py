"""What transformers computes from an export, to refuse an export that isn't our model.

The formulas need neither transformers nor our models: only config.json and the weights.

Letters in shapes: T tokens, C width, H heads, D = C / H, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lockstep.errors import UserError
from torch import Tensor

from lockstep_gpt.language_model import LanguageModel

LONGEST = 256  # tokens that are compared; more would take minutes with a large model
TOLERANCE = 1e-3  # relative to the largest logit; rounding in float32 gives about 1e-5
HASH = (36_313, 27_191)  # in an n-gram's hash: of the preceding tokens, of a token
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by transformers' names
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


@dataclass(frozen=True)
class Check:
    """How the export of one architecture is checked.

    Args:
        formula: tokens, content of config.json, and exported weights -> logits.
        written: what the export describes.
        remedy: what to do after an edit of the model's code.
    """

    formula: Callable[[Tensor, dict[str, Any], dict[str, Tensor]], Tensor]
    written: str
    remedy: str

    @torch.inference_mode()
    def refuse_other_logits(
        self, model: LanguageModel, config: dict[str, Any], weights: dict[str, Tensor], why: str
    ) -> None:
        """Compare the logits of `model` for random tokens with those of its export.

        Args:
            model: the model, in evaluation mode.
            config: the content of config.json.
            weights: the exported weights.
            why: begins the message.

        Raises:
            UserError: they differ, so the model's code was edited, but not its export.
        """
        length = min(LONGEST, model.block_size)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.vocab_size, (length,), generator=generator)
        ours = model(tokens[None])[0].float()
        largest = ours.abs().max().item()
        difference = (self.formula(tokens, config, weights) - ours).abs().max().item()
        if not difference <= TOLERANCE * largest:  # also if it is not a number
            raise UserError(
                f"{why}: the export's logits differ from the model's by up to {difference:.2g}, "
                f"where the largest is {largest:.2g}; transformers would compute something else: "
                f"export writes the unedited {self.written}; {self.remedy}"
            )


def gpt2_logits(tokens: Tensor, config: dict[str, Any], weights: dict[str, Tensor]) -> Tensor:
    """Return the logits, (T, V), of GPT-2 (Radford et al. 2019, section 2.3, and its code).

    GPT-2 is the decoder of Vaswani et al. 2017 with norms before each layer and after the last.
    Its matrices are (inputs, outputs). GELU is the approximation of Hendrycks and Gimpel 2016.
    """
    if config["activation_function"] not in ACTIVATIONS:
        raise UserError(
            f"activation_function={config['activation_function']} is not one of "
            f"{', '.join(ACTIVATIONS)}; add it to ACTIVATIONS in extras/hub/expected_logits.py"
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


def modern_logits(tokens: Tensor, config: dict[str, Any], weights: dict[str, Tensor]) -> Tensor:
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
        y = attention(q, k, v, config["attention_scale"])
        x = x + linear(y, f"{block}.attention.projection")
        hidden = F.relu(linear(normalized(x), f"{block}.mlp.expansion")).square()
        x = x + linear(hidden, f"{block}.mlp.projection")
    return linear(normalized(x), "output")


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention of (H, T, D), concatenated to (T, C); Vaswani et al. 2017, eq. 1."""
    T = q.shape[1]
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    shares = (q @ k.mT * scale).masked_fill(later, -torch.inf).softmax(dim=-1)
    return (shares @ v).transpose(0, 1).flatten(1)


def normalized(x: Tensor) -> Tensor:
    """Return `x` with mean 0 and variance 1 in its last dimension (Ba et al. 2016)."""
    return F.layer_norm(x, x.shape[-1:])


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of `x`, (H, T, D), by Su et al. 2021, section 3.2.2."""
    T, D = x.shape[1:]
    angles = torch.outer(torch.arange(T).float(), base ** (-torch.arange(0, D, 2) / D))
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


GPT2_CHECK = Check(
    gpt2_logits,
    "GPT-2",
    "if GPT-2 in transformers has a setting for your edit, such as activation_function, change it "
    "in GPT2_COMPUTES of extras/hub/layouts.py; if not, export code of your own, as modern does",
)
MODERN_CHECK = Check(
    modern_logits,
    "modeling_modern.py",
    "make your edit of modern.py in extras/hub/modeling_modern.py and expected_logits.py too",
)
