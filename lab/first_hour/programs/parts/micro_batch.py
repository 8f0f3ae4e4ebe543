"""A compiled micro-batch as in training: its time, its kernels, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from clock import DEVICE, DRY, milliseconds, seconds_of, show
from kernel_times import profiled
from lockstep.ranks.peaks import peak_of
from torch import nn

from parts.gradients import show_errors
from parts.recipe import ACCUMULATION, B, T, micro_batch, new_model, text_file
from parts.watch import Watch

PROFILED = 2  # micro-batches


def base() -> None:
    """Measure the model of a new run."""
    measure("base", new_model())


def float32_residual() -> None:
    """Measure it with the residual stream in float32, as in runs that earlier versions began."""
    measure("float32 residual", new_model(residual_dtype="float32"))


def coordinate_descent() -> None:
    """Measure it with Inductor's longer search for the sizes of its kernels' blocks."""
    import torch._inductor.config as inductor

    with inductor.patch(coordinate_descent_tuning=True):
        measure("coordinate descent", new_model(), kernels=False)


def measure(part: str, model: Any, kernels: bool = True) -> None:
    """Print the rows of a model: speed, gradients, and with `kernels`, what takes the time."""
    work = step_of(torch.compile(model.forward, dynamic=False))
    first = seconds_of(work)
    show_errors(part, model)
    with Watch() as watch:
        took = milliseconds(work)
    tokens_per_second = B * T / took * 1e3
    show(
        f"{part}: micro-batch",
        f"{took:.2f} ms, {tokens_per_second:,.0f} tok/s, "
        f"{utilization(model, tokens_per_second)}; compiled in {first:.0f} s; {watch}",
    )
    if kernels:
        times = profiled(work, PROFILED)
        show(f"{part}: kernels", f"{times.figures('micro-batch')}: {times.kinds()}")
        lines = [times.figures("micro-batch"), *times.lines()]
        text_file("kernels", part).write_text("\n".join(lines) + "\n")


def step_of(forward: Callable[..., Any]) -> Callable[[], None]:
    """Return what does forward and backward of a micro-batch, as training does."""
    tokens, targets = micro_batch()

    def work() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = forward(tokens, targets)
        (loss / ACCUMULATION).backward()

    return work


def utilization(model: nn.Module, tokens_per_second: float) -> str:
    """Return the share of the card's peak."""
    peak = None if DRY else peak_of(torch.cuda.get_device_name(), "bf16-mixed")
    if peak is None:
        return "MFU unknown"
    flops_per_token: Any = model.flops_per_token
    return f"MFU {flops_per_token * tokens_per_second / peak / 1e12:.1%}"
