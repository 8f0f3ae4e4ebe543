"""How far a model's gradients are from float32's: finds compilers that compute wrong ones."""

from __future__ import annotations

import functools
import statistics

import torch
from clock import show
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from parts.recipe import ACCUMULATION, B, micro_batch, new_model, text_file

SLICES = 8  # of a micro-batch, because float32 needs more memory
WRONG = 0.1  # relative error; rounding to bfloat16 gives about 0.01, and a lost gradient 1
WORST = 3  # errors in a row; a file has all


@functools.cache
def exact_gradients() -> dict[str, Tensor]:
    """Return the gradients of one micro-batch in float32, by torch's own functions."""
    model = new_model()
    tokens, targets = micro_batch()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        size = max(1, B // SLICES)
        for start in range(0, B, size):
            some = slice(start, start + size)
            loss = model(tokens[some], targets[some])
            (loss * size / B / ACCUMULATION).backward()
    torch.set_float32_matmul_precision(before)
    return {name: gradient_of(parameter) for name, parameter in model.named_parameters()}


def show_errors(part: str, model: nn.Module) -> None:
    """Print a row with the relative errors of a model that has done one micro-batch."""
    errors = {
        name: relative_error(gradient_of(parameter), exact_gradients()[name])
        for name, parameter in model.named_parameters()
    }
    by_size = sorted(errors, key=lambda name: -errors[name])
    lines = [f"{errors[name]:.1e}  {name}\n" for name in by_size]
    text_file("gradients", part).write_text("".join(lines))
    worst = ", ".join(f"{name} {errors[name]:.1e}" for name in by_size[:WORST])
    median = statistics.median(errors.values())
    wrong = not errors[by_size[0]] < WRONG  # also if it is no number
    result = f"relative errors: median {median:.1e}; the largest: {worst}"
    show(f"{part}: gradients", result, "FAILED" if wrong else "")


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, relative to that of `exact`."""
    return float((ours - exact).norm() / exact.norm().clamp(min=1e-30))


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, which must exist."""
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient")
    return parameter.grad
