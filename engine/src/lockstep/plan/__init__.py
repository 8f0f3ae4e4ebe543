"""Memory, time, and cost of a run by formulas, before it: for any `nn.Module`.

`Training` says what is trained, and `predict` what that takes on any devices. Each public name is
imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.plan.prediction import predict
    from lockstep.plan.table import as_text
    from lockstep.plan.training import Training

__all__ = ["Training", "as_text", "predict"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Training": "lockstep.plan.training:Training",
        "as_text": "lockstep.plan.table:as_text",
        "predict": "lockstep.plan.prediction:predict",
    },
)
