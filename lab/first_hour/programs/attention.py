"""Time torch's attention kernels, forward and backward, at the shapes of the recipes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from clock import DEVICE, DRY, milliseconds, show
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
# Two products forward and five backward, of which the causal mask leaves half.
PRODUCTS = (2 + 5) / 2


def main() -> None:
    """Time each kernel with heads of 64 and of 128."""
    B, T, C = (1, 128, 64) if DRY else (32, 1024, 768)
    for D in (32,) if DRY else (64, 128):
        heads = C // D
        inputs = [
            torch.randn(B, T, heads, D, device=DEVICE, dtype=torch.bfloat16)
            .transpose(1, 2)  # (B, heads, T, D), as the model's projections give it
            .detach()
            .requires_grad_()
            for _ in range(3)
        ]
        flops = PRODUCTS * 2 * B * heads * T * T * D
        for kernel in KERNELS:
            time_kernel(f"D={D} {kernel.name}", kernel, inputs, flops)
        time_kernel(f"D={D} torch's choice", None, inputs, flops)


def time_kernel(name: str, kernel: SDPBackend | None, inputs: list[Tensor], flops: float) -> None:
    """Print a row: the time, or why this device has no such kernel."""

    def work() -> None:
        output = F.scaled_dot_product_attention(*inputs, is_causal=True)
        output.backward(torch.ones_like(output))

    try:
        if kernel is None:
            took = milliseconds(work)
        else:
            with sdpa_kernel([kernel]):
                took = milliseconds(work)
    except RuntimeError as error:
        show(name, f"not here: {str(error).splitlines()[0][:100]}")
        return
    show(name, f"{took:.3f} ms, {flops / took / 1e9:.1f} TFLOP/s")


if __name__ == "__main__":
    main()
