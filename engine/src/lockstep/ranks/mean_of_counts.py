"""A strategy's mean over ranks of whole numbers, which Lightning rounds down."""

from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor


class MeanOfCounts(Strategy):
    """A mixin of strategies: the mean of integers isn't rounded.

    Lightning divides what `self.log` has added up by the mean number of samples on a rank. Where 2
    ranks have 23 and 24 samples, it would divide by 23.
    """

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Return the sum, mean, or the like over all ranks."""
        is_mean = reduce_op in (None, "mean", "avg")
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
