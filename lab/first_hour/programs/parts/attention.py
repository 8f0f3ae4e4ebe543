"""Time torch's attention kernels, forward and backward, at the shapes of the recipes."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from clock import DEVICE, DRY, milliseconds, show
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parts.recipe import B, C, L, T

KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    None,  # torch chooses
)
PRODUCTS = 2  # forward; backward has five
BOTH = 7 / 2


def main() -> None:
    """Time each kernel with heads of 64 and of 128."""
    for D in (16,) if DRY else (64, 128):
        inputs = slices(D)
        flops = PRODUCTS * 2 * B * C * T * T / 2  # the causal mask leaves half
        for kernel in KERNELS:
            name = "torch's choice" if kernel is None else kernel.name
            time_kernel(f"attention: D={D} {name}", kernel, inputs, flops)


def slices(width: int) -> tuple[Tensor, ...]:
    """Return q, k, and v, (B, heads, T, width), as the model has them: slices of one tensor."""
    qkv = torch.randn(B, T, 3, C // width, width, device=DEVICE, dtype=torch.bfloat16)
    return qkv.requires_grad_().permute(2, 0, 3, 1, 4).unbind()


def time_kernel(
    name: str, kernel: SDPBackend | None, inputs: tuple[Tensor, ...], flops: float
) -> None:
    """Print a row: the time, or why this device has no such kernel."""

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)

    # Random, because a GPU draws less power for constant data, and computes faster.
    slope = torch.randn_like(forward())
    choice = contextlib.nullcontext() if kernel is None else sdpa_kernel([kernel])
    try:
        with choice:
            with torch.no_grad():
                alone = milliseconds(forward, inner=5)
            both = milliseconds(lambda: torch.autograd.grad(forward(), inputs, slope), inner=3)
    except RuntimeError as error:
        show(name, f"not here: {str(error).splitlines()[0][:100]}")
        return
    show(
        name,
        f"forward {alone:.3f} ms, {flops / alone / 1e9:.0f} TFLOP/s; with backward {both:.3f} ms, "
        f"{BOTH * flops / both / 1e9:.0f} TFLOP/s; of {L} layers {L * both:.2f} ms",
    )
