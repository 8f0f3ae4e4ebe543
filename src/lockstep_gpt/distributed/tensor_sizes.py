"""What tensor parallelism can split, and into how many parts; checked before ranks start."""

from typing import Any

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.exact_sizes import either
from lockstep_gpt.model.model_settings import VOCAB_MULTIPLE
from lockstep_gpt.settings import check

SETTING = "strategy.tensor_parallel"
ARCHITECTURES = ("gpt", "modern")  # whose layers `tensor_splits` knows


def refuse_unsplittable(config: Config) -> None:
    """Raise a `UserError` for a model that can't be split evenly, or settings that need it whole.

    Each rank of a group has equally many heads, rows of embeddings, and columns of the MLP, whose
    width is a multiple of the heads.
    """
    size: Any = config.tensor_parallel  # not checked yet
    is_count = type(size) is int and size > 0
    check(SETTING, size, is_count, "must be a whole number from 1 on")
    if size == 1:
        return
    model = config.model
    fits = model.architecture in ARCHITECTURES
    rule = f"works with {either([*ARCHITECTURES])} only; set {SETTING}=1"
    check("model.architecture", model.architecture, fits, rule)
    counts = {
        f"model.n_head={model.n_head}": model.n_head,
        f"model.n_kv_head={model.n_kv_head}": model.n_kv_head or model.n_head,
        f"model.ngram_rows={model.ngram_rows}": model.ngram_rows,
        f"{VOCAB_MULTIPLE}, to whose multiples the vocabulary is padded": VOCAB_MULTIPLE,
    }
    possible = [
        parts
        for parts in range(1, VOCAB_MULTIPLE + 1)
        if not any(count % parts for count in counts.values())
    ]
    for name, count in counts.items():
        check(SETTING, size, count % size == 0, f"does not divide {name}; use {either(possible)}")
    remedy = f"does not work with {SETTING}={size}; set"
    save_parts = config.strategy.get("save_parts", False)
    check("strategy.save_parts", save_parts, not save_parts, f"{remedy} one of them to its default")


def refuse_unequal_noise(config: Config, has_gpus: bool) -> None:
    """Raise a `UserError` for dropout that would differ from one device's.

    The kernels of GPUs draw attention's noise themselves, by the number of a head on its device.
    """
    if config.tensor_parallel == 1 or not has_gpus:
        return
    dropout = config.model.dropout
    rule = f"differs from one device's on GPUs with {SETTING}={config.tensor_parallel}; set it to 0"
    check("model.dropout", dropout, not dropout, rule)
