"""Attention and the cross-entropy: the two functions in which a GPT's speed is decided."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 128  # tokens up to which plain products beat the fused kernel on a CPU
EXACT_ENOUGH = 1e-5  # relative error of a product; float32 itself rounds by 6e-8 per operation
IGNORE = -100  # a target that does not count
MANY_LOGITS = 1 << 25  # from here on they are computed in chunks
CHUNK_LOGITS = 1 << 23  # at a time
# GB moved at gpt2_124m, counted: whole logits 11, compiled chunks 17, eager ones 39, small ones 67.
WHOLE_SHARE = 0.15  # of a GPU's memory, for whole logits of 4 bytes each
GPU_CHUNK_LOGITS = 1 << 28  # at a time there: more than 4,096 rows of GPT-2's vocabulary


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None = None
) -> Tensor:
    """Let each token attend to itself and those before it (Vaswani et al. 2017, section 3.2).

    Queries, keys, values and the result are (B, n_head, T, D); the `scale` is 1 / sqrt(D) if None.
    """
    T, D = q.shape[-2:]
    if q.device.type != "cpu" or T > SHORT:
        settings: Any = {"is_causal": True, "scale": scale}
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **settings)
    queries, keys, values = (each.reshape(-1, T, D) for each in (q, k, v))
    later = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(later, queries, keys.mT, alpha=D**-0.5 if scale is None else scale)
    return (F.dropout(scores.softmax(dim=-1), dropout) @ values).view(q.shape)


def choose_matrix_products(device: str) -> str:
    """Take the fastest float32 matrix products that are exact enough; return what they are.

    On CPUs, torch's "medium" means oneDNN instead of MKL, more than twice as fast and as exact,
    except on processors where it means bfloat16: so the one at hand is tried.
    """
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
        return "TF32" if device == "cuda" else "Metal"
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

    Features are (B, T, C), the head's weights (V padded, C), targets (B, T) of any integer type.
    Logarithms and sum are float32 at least. Without a target that counts the loss is 0, not NaN.
    """
    features, targets = features.flatten(0, -2), targets.long().flatten()  # (N, C) and (N)
    if features.shape[0] * head.shape[0] > most_whole_logits(features.device):
        device = features.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            features, head = features.to(dtype), head.to(dtype)
        head = head if torch.is_grad_enabled() else head.detach()  # or it would get a gradient
        if features.dtype != torch.float16:  # its gradients vanish before the scaler's factor
            apply: Any = ChunkedCrossEntropy.apply
            if device == "cpu":  # where chunks were measured as eager code
                apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
            return cast(Tensor, apply(features, head, vocab_size, targets))
    logits = project_to_vocabulary(features, head, vocab_size)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)


def most_whole_logits(device: torch.device) -> int:
    """Return how many logits may exist as a whole: on a GPU many, where that code is compiled."""
    if device.type == "cuda" and torch.compiler.is_compiling():
        return int(WHOLE_SHARE * torch.cuda.get_device_properties(device).total_memory / 4)
    return MANY_LOGITS


class ChunkedCrossEntropy(torch.autograd.Function):
    """The cross-entropy of a linear head over some rows of logits at a time.

    Its gradient, softmax minus one at the target, is known as soon as a chunk's logits are: so it
    is taken on the way forward, and no logits are kept or computed twice. On a CPU it is faster
    than whole logits, and than torch 2.13's, and takes the memory of twice `CHUNK_LOGITS`.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, head: Tensor, vocab_size: int, targets: Tensor
    ) -> Tensor:
        """Return the mean; keep both gradients where they will be asked for."""
        wide = torch.promote_types(features.dtype, torch.float32)
        counted = targets != IGNORE
        weights = counted.to(wide) / counted.sum().clamp(min=1)  # (N)
        targets = targets.where(counted, 0)[:, None]  # (N, 1)
        loss = torch.zeros((), dtype=wide, device=features.device)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grads = (torch.empty_like(features), torch.zeros_like(head, dtype=wide)) if needed else ()
        rows = max(1, (GPU_CHUNK_LOGITS if features.is_cuda else CHUNK_LOGITS) // len(head))
        for start in range(0, len(features), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(features[chunk], head)
            logits[:, vocab_size:] = -math.inf
            log_p = F.log_softmax(logits, dim=1, dtype=wide)
            loss -= (log_p.gather(1, targets[chunk])[:, 0] * weights[chunk]).sum()
            if grads:
                slope = log_p.exp_()
                slope.scatter_(1, targets[chunk], slope.gather(1, targets[chunk]) - 1)
                slope = slope.mul_(weights[chunk, None]).to(features.dtype)
                torch.mm(slope, head, out=grads[0][chunk])
                if slope.dtype == wide:  # added where it belongs: no second matrix of that size
                    grads[1].addmm_(slope.T, features[chunk])
                else:
                    grads[1].add_(slope.T @ features[chunk])
        ctx.save_for_backward(*grads)
        ctx.head_dtype = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return what the forward has found, times what comes from without."""
        of_features, of_head = ctx.saved_tensors
        return of_features * outer, (of_head * outer).to(ctx.head_dtype), None, None
