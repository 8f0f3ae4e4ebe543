"""What the figures of all parts depend on: kernels that torch chooses, and the memory's speed."""

from __future__ import annotations

import torch
from clock import DEVICE, DRY, milliseconds, show
from torch.nn.attention import SDPBackend

from parts.recipe import T

BYTES = 1 << (20 if DRY else 30)


def main() -> None:
    """Print them."""
    for D in (64, 128):
        q = torch.empty(1, 6, T, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        choice = torch._fused_sdp_choice(q, q, q, None, 0.0, True)
        show(f"facts: attention's kernel, D={D}", SDPBackend(choice).name)
    source = torch.zeros(BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    took = milliseconds(lambda: target.copy_(source), inner=4)
    show("facts: copy", f"{2 * BYTES / took / 1e9:.2f} TB/s, read and written")
