"""Whether a difference between a run and its replay can come from rounding.

Bits differ where the processor, the library, or the order of sums does. Two replays on this machine
show what that may cause: one as it is, and one in which each weight gets one more rounding error in
each step. A run that differs from the first by more than `MARGIN` times as much as the second does
is not explained by rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MARGIN = 10.0
# The relative rounding error of what multiplies matrices.
ERRORS = {"64-true": 2.0**-53, "32-true": 2.0**-24, "16-mixed": 2.0**-11, "bf16-mixed": 2.0**-9}
LOSSES = ("train/loss", "val/loss", "optim/grad_norm")


class Rounding(NamedTuple):
    """The largest difference, in multiples of what the noise causes."""

    ratio: float
    place: str
    difference: float
    allowed: float  # of the replay with noise

    @property
    def is_explained(self) -> bool:
        """Return whether rounding can be the cause."""
        return self.ratio <= MARGIN


def _rounding(place: str, difference: float, allowed: float) -> Rounding:
    ratio = 0.0
    if difference:
        ratio = difference / allowed if allowed else math.inf
    return Rounding(ratio, place, difference, allowed)


def error_of(precision: str) -> float:
    """Return the relative rounding error of a precision, as Lightning names it."""
    return ERRORS.get(precision, 2.0**-24)


def largest_of_rows(rows: list[list[dict[str, str]]], error: float) -> Rounding:
    """Compare the losses and norms of rows with the same steps.

    Args:
        rows: those of the run, of the replay, and of the replay with noise.
        error: the relative rounding error.
    """
    worst = Rounding(0.0, "no row", 0.0, 0.0)
    reached = dict.fromkeys(LOSSES, 0.0)  # differences with noise so far
    for run, plain, noisy in zip(*rows, strict=True):
        for name in LOSSES:
            if not (run.get(name) and plain.get(name) and noisy.get(name)):
                continue
            value = float(plain[name])
            reached[name] = max(reached[name], abs(value - float(noisy[name])))
            allowed = max(reached[name], error * abs(value))
            difference = abs(value - float(run[name]))
            place = f"{name} of step {run['trainer/step']}"
            worst = max(worst, _rounding(place, difference, allowed))
    return worst


def largest_of_states(states: list[dict[str, Any]], step: int, error: float) -> Rounding:
    """Compare the weights of states saved after one step: of run, replay, and replay with noise."""
    import torch

    run, plain, noisy = states
    worst = Rounding(0.0, "no tensor", 0.0, 0.0)
    for name, weight in plain.items():
        is_weight = isinstance(weight, torch.Tensor) and "optimizer" not in name
        if not is_weight or not weight.is_floating_point() or name not in run:
            continue
        value = weight.double()
        floor = error * float(value.norm())
        allowed = max(float((value - noisy[name].double()).norm()), floor)
        difference = float((value - run[name].double()).norm())
        place = f"{name} after step {step}"
        worst = max(worst, _rounding(place, difference, allowed))
    return worst
