"""Attention and cross-entropy: the two functions that decide how fast a GPT trains."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 128  # on a CPU, plain products compute attention of up to so many tokens
IGNORE = -100  # a target with this value doesn't count
MANY_LOGITS = 1 << 25  # more logits than this are computed in chunks
CHUNK_LOGITS = 1 << 23  # logits per chunk
# GB moved at gpt2_124m, counted: whole logits 11; chunks: compiled 17, eager 39, small 67.
WHOLE_SHARE = 0.15  # of a GPU's memory may be used for whole logits, at 4 bytes each
GPU_CHUNK_LOGITS = 1 << 28  # logits per chunk on a GPU: over 4,096 rows of GPT-2's vocabulary


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None = None
) -> Tensor:
    """Let each token attend to itself and earlier tokens (Vaswani et al. 2017, section 3.2).

    Queries, keys, values, and the result are (B, n_head, T, D). A `scale` of None is 1 / sqrt(D).
    Keys and values may have fewer heads, of which each is for several neighboring queries' heads.
    """
    k, v, is_shared = with_heads_of(q, k, v)
    T, D = q.shape[-2:]
    if q.device.type != "cpu" or T > SHORT:
        settings: Any = {"is_causal": True, "scale": scale, "enable_gqa": is_shared}
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **settings)
    shares = causal_shares(q, k, scale)
    return (F.dropout(shares, dropout) @ v.reshape(-1, T, D)).view(q.shape)


def causal_shares(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """Return which share of its attention each token gives to each, (B n_head, T, T), by products.

    Queries and keys are (B, n_head, T, D). A `scale` of None is 1 / sqrt(D).
    """
    T, D = q.shape[-2:]
    if scale is None:
        scale = D**-0.5
    later = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(later, q.reshape(-1, T, D), k.reshape(-1, T, D).mT, alpha=scale)
    return scores.softmax(dim=-1)


def with_heads_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return keys and values, copied for each head of the queries unless a kernel shares them.

    The last result is whether a kernel does.
    """
    copies = q.shape[-3] // k.shape[-3]
    if copies == 1:
        return k, v, False
    if shares_heads(q):
        return k, v, True
    return k.repeat_interleave(copies, dim=-3), v.repeat_interleave(copies, dim=-3), False


def shares_heads(q: Tensor) -> bool:
    """Return whether FlashAttention or cuDNN's attention runs for `q`: only they share heads.

    torch would otherwise take its slow kernel without fusion.
    """
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 128  # some GPUs have no fused kernel for the gradients of wider heads
        and torch.cuda.get_device_properties(q.device).major >= 8
    )


def is_narrow(device: str) -> bool:
    """Return whether autocast computes in bfloat16, whose range is float32's."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def project_to_vocabulary(features: Tensor, head: Tensor, vocab_size: int) -> Tensor:
    """Turn features (..., C) and head weights (V padded, C) into logits (..., vocab_size).

    The padding rows make the product faster. Their logits are cut off afterward, so they are
    never predicted, and their gradient is exactly zero.
    """
    return F.linear(features, head)[..., :vocab_size]


def linear_cross_entropy(
    features: Tensor, head: Tensor, vocab_size: int, targets: Tensor
) -> Tensor:
    """Return the mean cross-entropy in nats over the targets that are not `IGNORE`.

    Features are (B, T, C), head weights (V padded, C), and targets (B, T) of any integer type.
    Logarithms and sums use at least float32. If no target counts, the loss is 0, not NaN.
    """
    features = features.flatten(0, -2)  # (N, C)
    targets = targets.long().flatten()  # (N)
    if features.shape[0] * head.shape[0] > most_whole_logits(features.device):
        device = features.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            features = features.to(dtype)
            head = head.to(dtype)
        if not torch.is_grad_enabled():
            head = head.detach()  # avoids its gradient
        if features.dtype != torch.float16:  # gradients would underflow before the loss scale
            apply: Any = ChunkedCrossEntropy.apply
            if device == "cpu":  # chunks were measured in eager mode there
                apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
            return cast(Tensor, apply(features, head, vocab_size, targets))
    if torch.compiler.is_compiling():  # aligned rows: 2.3 of 18.9 ms at gpt2_124m on an H200
        padding = torch.arange(len(head), device=features.device) >= vocab_size
        logits = F.linear(features, head).masked_fill(padding, -math.inf)  # (N, V padded)
    else:
        logits = project_to_vocabulary(features, head, vocab_size)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)


def perplexity(loss: float) -> float:
    """Return the exp of a loss in nats; at most that of 709, near the largest float."""
    return math.exp(min(loss, 709.0))


def most_whole_logits(device: torch.device) -> int:
    """Return how many logits may exist at once: a share of memory in compiled GPU code."""
    if device.type == "cuda" and torch.compiler.is_compiling():
        return int(WHOLE_SHARE * torch.cuda.get_device_properties(device).total_memory / 4)
    return MANY_LOGITS


class ChunkedCrossEntropy(torch.autograd.Function):
    """The cross-entropy of a linear head, computed for some rows of logits at a time.

    A chunk's logits already give its gradient: softmax minus one at the target. So the forward
    pass computes it, and no logits are kept or computed twice. On a CPU this is faster than whole
    logits and than torch 2.13's version, and uses the memory of twice `CHUNK_LOGITS`.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, head: Tensor, vocab_size: int, targets: Tensor
    ) -> Tensor:
        """Return the mean loss; save both gradients if backward needs one."""
        wide = torch.promote_types(features.dtype, torch.float32)
        counted = targets != IGNORE
        weights = counted.to(wide) / counted.sum().clamp(min=1)  # (N)
        targets = targets.where(counted, 0)[:, None]  # (N, 1)
        loss = torch.zeros((), dtype=wide, device=features.device)
        grads: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grads = torch.empty_like(features), torch.zeros_like(head, dtype=wide)
        chunk_logits = GPU_CHUNK_LOGITS if features.is_cuda else CHUNK_LOGITS
        rows = max(1, chunk_logits // len(head))
        for start in range(0, len(features), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(features[chunk], head)
            logits[:, vocab_size:] = -math.inf
            log_p = F.log_softmax(logits, dim=1, dtype=wide)
            # Not in place: torch 2.11 compiles a returned tensor that was changed to no gradient.
            loss = loss - (log_p.gather(1, targets[chunk])[:, 0] * weights[chunk]).sum()
            if grads:
                slope = log_p.exp_()
                slope.scatter_(1, targets[chunk], slope.gather(1, targets[chunk]) - 1)
                slope = slope.mul_(weights[chunk, None]).to(features.dtype)
                torch.mm(slope, head, out=grads[0][chunk])
                if slope.dtype == wide:  # adds in place, without a second matrix of that size
                    grads[1].addmm_(slope.T, features[chunk])
                else:
                    grads[1].add_(slope.T @ features[chunk])
                del slope
            del logits, log_p  # or the next chunk's exist beside them
        ctx.save_for_backward(*grads)
        ctx.head_dtype = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the saved gradients, multiplied by the gradient of the output."""
        of_features, of_head = ctx.saved_tensors
        return of_features * outer, (of_head * outer).to(ctx.head_dtype), None, None
