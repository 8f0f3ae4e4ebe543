"""Sums over the ranks of a tensor group, in forward or in backward.

Both act as one: what one rank's loss is differentiated by is the whole model, not its part.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lockstep.strategies.tensor_splits import TensorRanks


def sum_outputs(part: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the sum of the ranks' tensors; its gradient is that of each of them."""
    apply: Any = SumOutputs.apply
    return cast(Tensor, apply(part, ranks))


def sum_gradients(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return `x`, which is equal on all ranks; its gradient is the sum of the ranks' gradients."""
    apply: Any = SumGradients.apply
    return cast(Tensor, apply(x, ranks))


def narrowed(x: Tensor) -> Tensor:
    """Return `x` in the type of the product that follows, so that its gradient travels in it."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


class SumOutputs(torch.autograd.Function):
    """A sum in forward, and nothing in backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:  # noqa: ARG004
        """Return the sum of the ranks' tensors."""
        total = ranks.sum_of(part)
        # Not `total` itself, which was changed in place: torch 2.11 compiles a Function that
        # returns such a tensor to no gradient (pytorch#180642).
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        """Return the gradient, which all ranks have."""
        return gradient, None


class SumGradients(torch.autograd.Function):
    """Nothing in forward, and a sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        """Return `x`."""
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the ranks' gradients."""
        ranks: TensorRanks = ctx.ranks
        return ranks.sum_of(gradient), None
