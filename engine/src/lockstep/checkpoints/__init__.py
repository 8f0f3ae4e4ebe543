"""Checkpoints on disk: written whole, verified, copied, and read.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.checkpoints.reading import read_checkpoint, with_newest
    from lockstep.checkpoints.weights import restore, set_weights, weights_for

__all__ = [
    "read_checkpoint",
    "restore",
    "set_weights",
    "weights_for",
    "with_newest",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "read_checkpoint": "lockstep.checkpoints.reading:read_checkpoint",
        "restore": "lockstep.checkpoints.weights:restore",
        "set_weights": "lockstep.checkpoints.weights:set_weights",
        "weights_for": "lockstep.checkpoints.weights:weights_for",
        "with_newest": "lockstep.checkpoints.reading:with_newest",
    },
)
