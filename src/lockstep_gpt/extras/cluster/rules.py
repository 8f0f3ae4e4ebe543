"""What follows from the size of a model: its shape, batch, budget, and rates.

The size counts the weights of the blocks, by which every token is multiplied (Kaplan et al. 2020,
section 2.1). The embeddings, most of all those of n-grams, have more weights, but a token reads
only a few of their rows. docs/cluster.md gives the source of each number.
"""

import math
import re
from typing import Any

from lockstep_gpt.settings import check

UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}
SMALLEST, LARGEST = 1e4, 1e12
HEAD_WIDTH, HEAD_STEP = 32, 4  # approximate head width; its divisor
TOKENS_PER_WEIGHT = 2
# From modern_nano's recipe, the source of all rates.
WIDTH, HEAD_SHARE = 128, 0.2
BATCH, AT_SIZE = 1024, 1e5  # tokens of a step, at this size
BATCH_POWER = 0.5
DEVICES = 8  # a divisor of a step's windows
LR, WARMUP, DECAY = 0.03, 0.02, 0.0


def parsed(text: str) -> float:
    """Return the number of weights in a text such as 1.5M, or raise a `UserError`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmb]?)", text.replace("_", "").lower())
    size = 0.0
    if match:
        size = float(match[1]) * UNITS[match[2]]
    rule = "is not a number of weights from 10k to 1000B; write, for example, 300k or 1.5B"
    check("size.weights", text, SMALLEST <= size <= LARGEST, rule)
    return size


def shape(size: float) -> dict[str, int]:
    """Return the shape nearest to the size, with as many heads of about 32 as layers."""
    layers = max(1, round((size / (12 * HEAD_WIDTH**2)) ** (1 / 3)))
    head = HEAD_STEP * max(1, round(math.sqrt(size / (12 * layers**3)) / HEAD_STEP))
    return {"n_layer": layers, "n_head": layers, "n_embd": layers * head}


def weights(n_layer: int, n_embd: int) -> int:
    """Return the weights of the blocks: 4 C^2 of attention and 8 C^2 of the MLP in each."""
    return 12 * n_layer * n_embd**2


def rules(size: str, block_size: int) -> dict[str, Any]:
    """Return setting -> value for a size, or raise a `UserError`.

    The learning rate is the same for all widths: an orthogonal update, or one of an embedding,
    changes each feature equally at any width. The head sums as many features as the model is wide,
    so its rate falls with the width (Yang & Hu 2021; Yang et al. 2022, table 3).
    """
    wanted = parsed(size)
    dimensions = shape(wanted)
    count = weights(dimensions["n_layer"], dimensions["n_embd"])
    windows = BATCH * (count / AT_SIZE) ** BATCH_POWER / block_size
    batch = DEVICES * max(1, round(windows / DEVICES))
    tokens = TOKENS_PER_WEIGHT * count
    return {
        **{f"model.{name}": value for name, value in dimensions.items()},
        "batch.global_size": batch,
        "batch.reference_size": batch,
        "max_tokens": tokens,
        "max_steps": None,
        "optim.algorithm": "muon",
        "optim.lr": LR,
        "optim.lr_scaling": "sqrt",
        "optim.head_lr_fraction": round(HEAD_SHARE * WIDTH / dimensions["n_embd"], 4),
        "optim.warmup_tokens": round(WARMUP * tokens),
        "optim.warmup_steps": None,
        "optim.weight_decay": DECAY,
    }
