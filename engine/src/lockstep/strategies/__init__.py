"""How ranks share a model and add gradients: DDP, FSDP2, exact sums.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.strategies.optimizers import keep_own_settings
    from lockstep.strategies.placing import layout_of

__all__ = [
    "keep_own_settings",
    "layout_of",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "keep_own_settings": "lockstep.strategies.optimizers:keep_own_settings",
        "layout_of": "lockstep.strategies.placing:layout_of",
    },
)
