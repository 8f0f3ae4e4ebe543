"""The gradient noise scale: the batch size that the gradients themselves suggest.

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training": per-sample
gradients scatter around the true gradient G with covariance Sigma. `tr(Sigma) / |G|^2`, in
samples, is the batch size at which noise and signal are equal. Below it, doubling the batch
nearly halves the steps; above it, doubling saves few steps. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """The measurement of one step: squared gradient norms at two batch sizes.

    Attributes:
        small_batch: samples in each part's gradient, on average.
        big_batch: samples in the average over all parts.
        small: squared norm of a part's gradient, averaged over the parts by their targets.
        big: squared norm of the average gradient.
    """

    small_batch: float
    big_batch: int
    small: float
    big: float

    @property
    def signal(self) -> float:
        """An unbiased estimate of |G|^2 (equation A.2); it can be negative."""
        difference = self.big_batch * self.big - self.small_batch * self.small
        return difference / (self.big_batch - self.small_batch)

    @property
    def noise(self) -> float:
        """An unbiased estimate of tr(Sigma) for a single sample (equation A.2)."""
        return (self.small - self.big) / (1 / self.small_batch - 1 / self.big_batch)


class NoiseScale:
    """Averages signal and noise separately over recorded steps, then divides the averages.

    The ratio of two noisy estimates is biased; the ratio of their averages hardly is. The averages
    are exponential, weighted so that the first measurement counts no more than the last.

    Args:
        smoothing: fraction of the average that is kept at each measurement.
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.signal = self.noise = self.weight = 0.0

    def add(self, measurement: Measurement) -> None:
        """Add the measurement of one step, unless it isn't finite."""
        signal = measurement.signal
        noise = measurement.noise
        if not math.isfinite(signal + noise):
            return
        keep = self.smoothing
        add = 1 - self.smoothing
        self.signal = keep * self.signal + add * signal
        self.noise = keep * self.noise + add * noise
        self.weight = keep * self.weight + add

    @property
    def scale(self) -> float | None:
        """Return tr(Sigma) / |G|^2 in samples, or None while noise hides the signal."""
        if self.signal <= 0 or self.noise <= 0:
            return None
        return self.noise / self.signal

    def state_dict(self) -> dict[str, float]:
        """Return the averages, for the checkpoint."""
        return {"signal": self.signal, "noise": self.noise, "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore saved averages."""
        self.signal = state["signal"]
        self.noise = state["noise"]
        self.weight = state["weight"]


def steps_left(scale: float, batch: float) -> float:
    """Return the fraction of the steps that twice the batch needs to reach the same loss.

    Steps are proportional to `1 + scale / batch` (equation 2.11), so this is from 1/2 to 1.
    """
    return (1 + scale / (2 * batch)) / (1 + scale / batch)


def advice(scale: float | None, batch: int, tokens_per_sample: int) -> str:
    """Return one sentence: the batch size that the noise suggests, and if more devices pay off.

    Args:
        scale: the noise scale in samples; None if it could not be measured.
        batch: current samples per optimizer step.
        tokens_per_sample: of text; 0: samples have no tokens.
    """
    if scale is None:
        return (
            f"gradient noise scale: not measurable at {batch} samples per step, as noise hides the "
            "signal; a larger batch does not hurt"
        )
    size = max(1, _two_digits(scale))
    tokens = f" ({_two_digits(size * tokens_per_sample):,} tokens)" if tokens_per_sample else ""
    suggestion = (
        f"gradient noise scale: averaging pays up to about {size:,} sample{'s' * (size > 1)}"
        f"{tokens} per step; a step has {batch:,}"
    )
    left = f"twice the batch would need {steps_left(scale, batch):.0%} of the steps"
    if scale > 2 * batch:
        return f"{suggestion}. More devices still pay: {left}"
    if scale > batch / 2:
        return f"{suggestion}, near the best trade-off: {left}"
    return f"{suggestion}. More devices hardly pay: {left}"


def _two_digits(value: float) -> int:
    """Round `value` to two significant digits, more than an estimate supports."""
    return int(round(value, min(0, 1 - math.floor(math.log10(value)))))


UNMEASURED = (
    "gradient noise scale: not measured, because one rank with one micro-batch per step gives only "
    "one gradient; use two ranks, or a smaller batch.micro_size"
)
