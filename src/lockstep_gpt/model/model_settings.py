"""Settings of the model, and the model of such settings."""

import importlib
import inspect
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lockstep_gpt.errors import defined_in
from lockstep_gpt.model.shape import check_heads
from lockstep_gpt.settings import Checked, check, is_module, setting

if TYPE_CHECKING:
    from lockstep_gpt.model.language_model import LanguageModel


@dataclass
class ModelConfig(Checked):
    """The shape of the GPT; its vocabulary size comes from the data's tokenizer."""

    node: ClassVar[str] = "model"
    on_resume: ClassVar[str] = "kept"
    block_size: int = setting("tokens of context, T", at_least=1)
    n_layer: int = setting("transformer blocks", at_least=1, at_most=10_000)
    n_head: int = setting("attention heads per block", at_least=1)
    n_embd: int = setting("width of the residual stream, C", at_least=1)
    dropout: float = setting("dropout probability", 0.0, on_resume="free", at_least=0, below=1)
    bias: bool = setting("biases in linear layers and norms, as in GPT-2", True)
    # Presets of new runs set it to bfloat16; a run that an earlier version began keeps float32.
    residual_dtype: str = setting(
        "gpt: type of the residual stream with precision=bf16-mixed; bfloat16 takes less memory "
        "and time; modern: always bfloat16",
        "float32",
        choices=("float32", "bfloat16"),
    )
    architecture: str = setting("gpt, modern, or another module of model/", "gpt")
    activation_checkpointing: bool = setting(
        "keep only inputs of blocks, recompute the rest in backward", False, on_resume="free"
    )
    n_kv_head: int | None = setting(
        "heads of keys and values, if the architecture shares them; null: n_head", None, at_least=1
    )
    ngram_rows: int = setting(
        "modern: rows per n-gram embedding table; 0: none", 0, at_least=0, at_most=10**8
    )
    longest_ngram: int = setting(
        "largest n of the n-grams; the smallest is 2", 2, at_least=2, at_most=32
    )
    init_from: str | None = setting(
        "run, checkpoint, or transformers folder with initial weights; null: random",
        None,
        on_resume="free",
    )

    def __post_init__(self) -> None:
        """Also check that the heads divide the width evenly, and that the architecture exists."""
        super().__post_init__()
        if not is_module("model", self.architecture):
            self.refuse("architecture", "is not gpt, modern, or another module of model/")
        check_heads(self.n_head, self.n_embd, self.n_kv_head)


def build_gpt(config: ModelConfig, vocab_size: int) -> "LanguageModel":
    """Build the model of `model.architecture` with the settings that its class has arguments for.

    It is the class `ModernGPT` of `modern`, and `GPT` of any other module of model/.
    """
    module = importlib.import_module(f"{__package__}.{config.architecture}")
    name = "ModernGPT" if config.architecture == "modern" else "GPT"
    kind = defined_in(module, name, "model/gpt.py")
    accepted = inspect.signature(kind).parameters
    _refuse_without_effect(config, accepted)
    settings = {name: value for name, value in vars(config).items() if name in accepted}
    model: LanguageModel = kind(vocab_size=vocab_size, **settings)
    return model


def _refuse_without_effect(config: ModelConfig, accepted: Container[str]) -> None:
    """Raise a `UserError` for a setting that the model has no argument for."""
    name = config.architecture
    if name == "modern":
        check("model.bias", config.bias, not config.bias, "is not for modern models; set false")
    fits = "bias" in accepted or config.bias or name == "modern"
    check("model.bias", config.bias, fits, f"is not for {name} models; set true")
    fits = "n_kv_head" in accepted or config.n_kv_head in (None, config.n_head)
    rule = "is only for modern models; remove it, or set model.architecture=modern"
    check("model.n_kv_head", config.n_kv_head, fits, rule)
    fits = "ngram_rows" in accepted or not config.ngram_rows
    check("model.ngram_rows", config.ngram_rows, fits, rule)
    fits = "dropout" in accepted or not config.dropout
    check("model.dropout", config.dropout, fits, f"is not for {name} models; set 0")
    fits = "activation_checkpointing" in accepted or not config.activation_checkpointing
    rule = f"is not for {name} models; set false"
    check("model.activation_checkpointing", config.activation_checkpointing, fits, rule)
