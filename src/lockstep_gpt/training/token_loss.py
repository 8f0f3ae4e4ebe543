"""The validation loss: exact over batches and ranks of any size."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lockstep_gpt.model.functional import IGNORE


class TokenLoss(Metric):
    """Mean cross-entropy by sums over tokens: the mean of means would overrate a short batch.

    The sums of batches are added without rounding in between (`math.fsum`), so the mean is the same
    to the bit however batches are spread over ranks.
    """

    full_state_update = False
    totals: list[Tensor] | Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("totals", [], dist_reduce_fx="cat")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, targets: Tensor) -> None:
        """Add the mean `loss` over those of `targets` that are not `IGNORE`."""
        count = (targets != IGNORE).sum()
        self.totals.append(loss.double() * count)  # type: ignore[union-attr]
        self.count += count

    def compute(self) -> Tensor:
        """Return the mean over all tokens of all ranks, in nats; its exp is the perplexity."""
        totals = dim_zero_cat(self.totals).tolist()
        add = math.fsum if all(map(math.isfinite, totals)) else sum  # the former refuses the rest
        return torch.tensor(add(totals), dtype=torch.float64) / self.count.cpu()


def perplexity(loss: float) -> float:
    """Return the exp of a loss in nats; of a hopeless one the largest that a float holds."""
    return math.exp(min(loss, 709.0))
