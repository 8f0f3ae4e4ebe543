"""What tensor parallelism can split, and into how many parts; checked before ranks start."""

import math
from collections.abc import Mapping
from typing import Any

from lockstep_gpt.batch import either
from lockstep_gpt.settings import check

SETTING = "strategy.tensor_parallel"
ARCHITECTURES = ("gpt", "modern")  # whose layers `tensor_splits` knows


def refuse_unsplittable(
    parts: Any, architecture: str, counts: Mapping[str, int], *, saves_parts: bool
) -> None:
    """Raise a `UserError` for a model that can't be split evenly, or settings that need it whole.

    Args:
        parts: the number of ranks that split each matrix; not checked yet.
        architecture: the name of the model's class of layers.
        counts: name with value -> what each rank of a group has equally many of, such as heads,
            rows of embeddings, and columns of the MLP, whose width is a multiple of the heads.
        saves_parts: whether each rank saves its own shards.
    """
    is_count = type(parts) is int and parts > 0
    check(SETTING, parts, is_count, "must be a whole number from 1 on")
    if parts == 1:
        return
    fits = architecture in ARCHITECTURES
    rule = f"works with {either([*ARCHITECTURES])} only; set {SETTING}=1"
    check("model.architecture", architecture, fits, rule)
    largest = math.gcd(*counts.values())
    possible = [size for size in range(1, largest + 1) if largest % size == 0]
    for name, count in counts.items():
        rule = f"does not divide {name}; use {either(possible)}"
        check(SETTING, parts, count % parts == 0, rule)
    rule = f"does not work with {SETTING}={parts}; set one of them to its default"
    check("strategy.save_parts", saves_parts, not saves_parts, rule)


def refuse_unequal_noise(parts: int, dropout: float) -> None:
    """Raise a `UserError` for dropout on GPUs, of which several split a model.

    Their kernels draw attention's noise themselves, by the number of a head on its device.
    """
    rule = f"differs from one device's on GPUs with {SETTING}={parts}; set it to 0"
    check("model.dropout", dropout, not dropout, rule)
