"""The validation loss: exact over batches and ranks of any size."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep_gpt.model.functional import IGNORE


class TokenLoss(Metric):
    """Mean cross-entropy over tokens, as a sum and a count that add up over batches and ranks.

    The mean of means would weigh a short last batch like a full one.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, targets: Tensor) -> None:
        """Add the mean `loss` over those of `targets` that are not `IGNORE`."""
        count = (targets != IGNORE).sum()
        self.total += loss.double() * count
        self.count += count

    def compute(self) -> Tensor:
        """Return the mean over all tokens of all ranks, in nats; its exp is the perplexity."""
        return self.total / self.count


def perplexity(loss: float) -> float:
    """Return the exp of a loss in nats; of a hopeless one the largest that a float holds."""
    return math.exp(min(loss, 709.0))
