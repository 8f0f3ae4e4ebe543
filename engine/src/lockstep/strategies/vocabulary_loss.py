"""The loss of a vocabulary that is split over tensor ranks; no rank ever has all logits."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import functional
from lockstep.functional import IGNORE
from lockstep.strategies.tensor_splits import TensorRanks
from lockstep.strategies.tensor_sums import narrowed, sum_gradients


def split_cross_entropy(
    features: Tensor, head: Tensor, vocab_size: int, targets: Tensor, ranks: TensorRanks
) -> Tensor:
    """Return what `functional.linear_cross_entropy` does for the whole head, on each rank.

    Features are (B, T, C) and targets (B, T), equal on all ranks; head is this rank's part of the
    weights, (V padded / ranks, C).
    """
    features = sum_gradients(narrowed(features.flatten(0, -2)), ranks)  # (N, C)
    if not torch.is_grad_enabled():
        head = head.detach()  # avoids its gradient
    apply: Any = SplitCrossEntropy.apply
    targets = targets.long().flatten()  # (N)
    return cast(Tensor, apply(features, head.to(features.dtype), vocab_size, targets, ranks))


def split_logits(features: Tensor, head: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """Return all logits, (..., vocab_size), of features, (..., C), which all ranks have.

    Every rank of the group must call this; no gradient flows back.
    """
    part = F.linear(features.detach(), head.detach())  # (..., V padded / ranks)
    return torch.cat(ranks.each(part), dim=-1)[..., :vocab_size]


class SplitCrossEntropy(torch.autograd.Function):
    """The cross-entropy of a linear head whose rows are split, for some rows of logits at a time.

    As in `functional.ChunkedCrossEntropy`, forward computes the gradient. Ranks exchange one number
    per target, the logarithm of the sum of its exponentials, and at the end the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        head: Tensor,
        vocab_size: int,
        targets: Tensor,
        ranks: TensorRanks,
    ) -> Tensor:
        """Return the mean loss; save both gradients if backward needs one."""
        wide = torch.promote_types(features.dtype, torch.float32)
        counted = targets != IGNORE
        weights = counted.to(wide) / counted.sum().clamp(min=1)  # (N)
        first = ranks.rank * len(head)
        own = targets - first
        here = counted & (own >= 0) & (own < len(head))  # whose targets are among this rank's
        own = own.where(here, 0)[:, None]  # (N, 1)
        shares = weights.where(here, 0)
        loss = torch.zeros((), dtype=wide, device=features.device)
        grads: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grads = torch.empty_like(features), torch.zeros_like(head, dtype=wide)
        chunk_logits = functional.CHUNK_LOGITS
        if features.is_cuda:
            chunk_logits = functional.GPU_CHUNK_LOGITS
        rows = max(1, chunk_logits // len(head))
        for start in range(0, len(features), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(features[chunk], head).to(wide)
            logits[:, max(0, vocab_size - first) :] = -math.inf
            log_p = logits.sub_(log_sums(logits, ranks)[:, None])
            own_log_p = (log_p.gather(1, own[chunk])[:, 0] * shares[chunk]).where(here[chunk], 0)
            loss = loss - own_log_p.sum()  # not in place, as in `functional.ChunkedCrossEntropy`
            if grads:
                slope = log_p.exp_().mul_(weights[chunk, None])
                slope.scatter_add_(1, own[chunk], -shares[chunk, None])
                slope = slope.to(features.dtype)
                torch.mm(slope, head, out=grads[0][chunk])
                if slope.dtype == wide:
                    grads[1].addmm_(slope.T, features[chunk])
                else:
                    grads[1].add_(slope.T @ features[chunk])
        ctx.save_for_backward(*grads)
        ctx.head_dtype = head.dtype
        return ranks.sum_of(loss).clone()  # not the tensor changed in place; FSDP warns of a view

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the saved gradients, multiplied by the gradient of the output."""
        of_features, of_head = ctx.saved_tensors
        return of_features * outer, (of_head * outer).to(ctx.head_dtype), None, None, None


def log_sums(logits: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the logarithm of the sum of exponentials over all ranks' logits, (N)."""
    part = logits.logsumexp(dim=1)  # -inf if this rank has only padding
    return torch.stack(ranks.each(part)).logsumexp(dim=0)
