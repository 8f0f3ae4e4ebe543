"""Attention and the cross-entropy: the two functions in which a GPT's speed is decided."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that does not count


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Let each token attend to itself and those before it (Vaswani et al. 2017, section 3.2).

    Args:
        q: queries, (B, n_head, T, C / n_head).
        k: keys, of the same shape.
        v: values, of the same shape, which the result has as well.
        dropout: share of attention weights that is dropped.
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def project_to_vocabulary(features: Tensor, head: Tensor, vocab_size: int) -> Tensor:
    """Turn features (..., C) and head weights (V padded, C) into logits (..., vocab_size).

    The padding rows take part in the product, whose speed they serve, and are cut off after it:
    they are never predicted and their gradient is exactly zero.
    """
    return F.linear(features, head)[..., :vocab_size]


def linear_cross_entropy(
    features: Tensor, head: Tensor, vocab_size: int, targets: Tensor
) -> Tensor:
    """Return the mean cross-entropy in nats over the targets that are not `IGNORE`.

    The caller never sees the logits, so the body may compute them in pieces. The logarithms and
    the sum are taken in float32 at least, whatever the autocast. Without any target that counts
    the loss is 0, not NaN.

    Args:
        features: last hidden states, (B, T, C).
        head: weights of the head, (V padded, C).
        vocab_size: V, the rows of `head` that stand for tokens.
        targets: the next tokens, (B, T), of any integer type.
    """
    logits = project_to_vocabulary(features, head, vocab_size).flatten(0, -2)  # (B * T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.long().flatten()  # (B * T)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)
