"""Time each matrix product of the recipe alone, with the clock and the watts under its load."""

from __future__ import annotations

import torch
from clock import DEVICE, milliseconds, show

from parts.recipe import PADDED_V, B, C, L, T
from parts.watch import Watch

SHAPES = {  # outputs, inputs, and how often a micro-batch has it
    "qkv": (3 * C, C, L),
    "projection": (C, C, L),
    "expansion": (4 * C, C, L),
    "contraction": (C, 4 * C, L),
    "head": (PADDED_V, C, 1),
}
LARGE = 10_000  # outputs


def main() -> None:
    """Print a row for each shape, and one for all."""
    N = B * T
    milliseconds_of_all = 0.0
    flops_of_all = 0.0
    for name, (outputs, inputs, times) in SHAPES.items():
        x = torch.randn(N, inputs, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) * 0.02
        slope = torch.randn(N, outputs, device=DEVICE, dtype=torch.bfloat16)
        works = (lambda: x @ weight.T, lambda: slope @ weight, lambda: slope.T @ x)  # noqa: B023
        inner = 4 if outputs > LARGE else 40
        with Watch() as watch:
            each = [milliseconds(work, repeats=8, inner=inner) for work in works]
        flops = 2.0 * N * outputs * inputs
        milliseconds_of_all += times * sum(each)
        flops_of_all += times * len(each) * flops
        rates = ", ".join(f"{flops / took / 1e9:.0f}" for took in each)
        order = "(forward, input's gradient, weight's gradient)"
        show(f"products: {name}", f"{rates} TFLOP/s {order}; {watch}")
    rate = flops_of_all / milliseconds_of_all / 1e9
    show("products: all of a micro-batch", f"{milliseconds_of_all:.2f} ms, {rate:.0f} TFLOP/s")
