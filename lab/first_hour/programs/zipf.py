"""Tokens that follow Zipf's law, as those of text do: the frequency of rank r is about 1 / r.

With uniform tokens, a GPU would add to another row of the embedding's gradient for almost every
token. In text, many of its threads add to the few rows of the frequent tokens, and wait for each
other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SEED = 1


def zipf(shape: int | tuple[int, ...], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return tokens below `vocab_size`, the same in each call; token 0 is the most frequent."""
    logarithms: Any = np.random.default_rng(SEED).random(shape)
    ranks = (vocab_size**logarithms).astype(np.int64)  # from 1; by floats perhaps vocab_size
    return np.minimum(ranks, vocab_size) - 1
