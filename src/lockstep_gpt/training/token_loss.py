"""The validation loss: exact over batches and ranks of any size."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lockstep_gpt.model.functional import IGNORE


class TokenLoss(Metric):
    """Mean cross-entropy from sums over tokens: a mean of means would overweight a short batch.

    Ranks that split a model all count their common batches, which changes neither mean nor bits.
    The host adds the sums of batches in float64, which Apple's GPUs don't have, without rounding
    in between (`math.fsum`): bit-identical for any distribution of batches over ranks.
    """

    full_state_update = False
    means: list[Tensor]
    counts: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.targets = 0  # how many `compute` has counted
        self.add_state("means", [], dist_reduce_fx="cat")
        self.add_state("counts", [], dist_reduce_fx="cat")

    def update(self, loss: Tensor, targets: Tensor) -> None:
        """Add the mean `loss` over those of `targets` that are not `IGNORE`."""
        self.means.append(loss)
        self.counts.append((targets != IGNORE).sum())

    def compute(self) -> Tensor:
        """Return the mean over all tokens of all ranks, in nats; its exp is the perplexity."""
        means: list[float] = dim_zero_cat(self.means).tolist()
        counts: list[int] = dim_zero_cat(self.counts).tolist()
        totals = [mean * count for mean, count in zip(means, counts, strict=True)]
        is_finite = all(math.isfinite(total) for total in totals)
        total = math.fsum(totals) if is_finite else sum(totals)  # fsum rejects inf - inf
        self.targets = sum(counts)
        return torch.tensor(total / self.targets, dtype=torch.float64)
