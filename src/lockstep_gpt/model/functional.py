"""Attention and the cross-entropy: the two functions in which a GPT's speed is decided."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 128  # tokens up to which plain products beat the fused kernel on a CPU
EXACT_ENOUGH = 1e-5  # relative error of a product; float32 itself rounds by 6e-8 per operation
IGNORE = -100  # a target that does not count


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Let each token attend to itself and those before it (Vaswani et al. 2017, section 3.2).

    Args:
        q: queries, (B, n_head, T, C / n_head).
        k: keys, of the same shape.
        v: values, of the same shape, which the result has as well.
        dropout: share of attention weights that is dropped.
    """
    T = q.shape[-2]
    if q.device.type != "cpu" or T > SHORT:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # (B, n_head, T, T)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    return F.dropout(weights, dropout) @ v


def choose_matrix_products(device: str) -> str:
    """Take the fastest float32 matrix products that are exact enough; return what they are.

    On CPUs, torch's "medium" means oneDNN instead of MKL, more than twice as fast and as exact,
    except on processors where it means bfloat16: so the one at hand is tried.
    """
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        return "TF32"
    torch.set_float32_matmul_precision("medium")
    if product_error() < EXACT_ENOUGH:
        return "oneDNN"
    torch.set_float32_matmul_precision("highest")
    return "MKL"


def product_error() -> float:
    """Return the largest error of a float32 product, relative to the largest element."""
    source = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=source) for _ in range(2))
    exact = left.double() @ right.double()
    return float((left @ right - exact).abs().max() / exact.abs().max())


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
