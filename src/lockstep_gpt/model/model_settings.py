"""Settings of the model."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import Checked, is_module, setting

VOCAB_MULTIPLE = 64  # matrix products are fast at sizes that tensor cores divide evenly


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
        if self.n_kv_head is not None and self.n_head % self.n_kv_head:
            self.refuse("n_kv_head", f"does not divide model.n_head={self.n_head}")
        if self.n_embd % self.n_head:
            fits = self.n_head * max(1, round(self.n_embd / self.n_head))
            rule = f"is not divisible by model.n_head={self.n_head}; nearest: model.n_embd={fits}"
            self.refuse("n_embd", rule)
