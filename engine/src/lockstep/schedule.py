"""The learning rate of a run: its peak for a batch, and its course over the steps."""

import math
from dataclasses import dataclass

from lockstep.batch import Batch
from lockstep.settings import (
    check_choice,
    check_number,
    check_whole,
    counted,
    not_a_config,
)

DECAYS = ("cosine", "linear", "constant", "wsd")
SCALINGS = ("linear", "sqrt", "none")


@not_a_config
@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step; steps count from 0, the first update.

    The warmup rises linearly and reaches the peak in its last step (Goyal et al. 2017). The decay
    reaches `final_fraction` of the peak in the last step of the run, and stays there: `cosine`
    (Loshchilov & Hutter 2017), `linear`, `constant`, or `wsd` (warmup, stable, decay), which keeps
    the peak and then falls linearly (Zhai et al. 2022, Hu et al. 2024).

        >>> schedule = Schedule(steps=100, peak=0.5, warmup=10, decay="wsd", final_fraction=0)
        >>> [schedule.lr(step) for step in (0, 9, 79, 89, 99)]
        [0.05, 0.5, 0.5, 0.25, 0.0]

    With `torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)`, an optimizer follows it.

    Attributes:
        steps: optimizer steps of the run.
        peak: the highest learning rate.
        warmup: steps of the warmup; None: there is none. A run that is no longer, such as a quick
            try of a preset, warms up for a tenth of its steps instead.
        start_factor: the first step's rate in a warmup, as a fraction of the peak, as in torch's
            `LinearLR`; None: one part of as many as the warmup has steps.
        decay: how the rate falls.
        decay_fraction: of the run's steps, in which `wsd` falls.
        final_fraction: the last step's rate, as a fraction of the peak.

    Raises:
        UserError: an argument is out of range.
    """

    steps: int
    peak: float
    warmup: int | None = None
    start_factor: float | None = None
    decay: str = "cosine"
    decay_fraction: float = 0.2
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_whole("max_steps", self.steps, at_least=1)  # what a program calls them
        check_number("peak", self.peak, above=0)
        if self.warmup is not None:
            check_whole("warmup", self.warmup, at_least=0)
        if self.start_factor is not None:
            check_number("start_factor", self.start_factor, above=0, at_most=1)
        check_choice("decay", self.decay, DECAYS)
        check_number("decay_fraction", self.decay_fraction, above=0, at_most=1)
        check_number("final_fraction", self.final_fraction, at_least=0, at_most=1)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warmup, as the run has them."""
        warmup = self.warmup or 0
        return self.steps // 10 if warmup >= self.steps else warmup

    @property
    def decay_steps(self) -> int:
        """The last steps of the run, in which the rate falls; 0 for `constant`."""
        if self.decay == "constant":
            return 0
        longest = max(1, self.steps - max(1, self.warmup_steps))  # after the first at the peak
        if self.decay == "wsd":
            return min(longest, max(1, round(self.decay_fraction * self.steps)))
        return longest

    def lr(self, step: int) -> float:
        """Return the learning rate of update `step`."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """Return `lr(step)` as a fraction of the peak."""
        if step < self.warmup_steps:
            if self.start_factor is None:
                return (step + 1) / self.warmup_steps
            risen = step / (self.warmup_steps - 1) if self.warmup_steps > 1 else 1.0
            return self.start_factor + (1 - self.start_factor) * risen
        if self.decay_steps == 0:
            return 1.0
        ahead = (self.steps - 1 - step) / self.decay_steps  # fraction of the decay left
        ahead = min(1.0, max(0.0, ahead))
        if self.decay == "cosine":
            ahead = (1 - math.cos(math.pi * ahead)) / 2
        return self.final_fraction + (1 - self.final_fraction) * ahead

    def receipt_lines(self) -> dict[str, str]:
        """Return what a run says of its rate."""
        line = f"{counted(self.steps, 'step')}: {self.warmup_steps:,} of warmup to {self.peak:g}"
        if self.decay == "constant":
            return {"schedule": f"{line}, then constant"}
        final = f"{self.lr(self.steps - 1):g}"
        decay = f"{self.decay} decay over the last {self.decay_steps:,} to {final}"
        return {"schedule": f"{line}, {decay}"}


def scaled_lr(lr: float, batch: Batch, rule: str = "linear") -> float:
    """Return the peak learning rate for a batch, where `lr` was tuned for its `reference_size`.

        >>> batch = Batch(global_size=1024, reference_size=256)
        >>> scaled_lr(0.1, batch), scaled_lr(0.1, batch, "sqrt"), scaled_lr(0.1, batch, "none")
        (0.4, 0.2, 0.1)

    Args:
        lr: the tuned rate.
        batch: its `global_size` decides.
        rule: `linear`: in proportion to the batch (Goyal et al. 2017, section 2.1). `sqrt`: to its
            square root, which keeps the variance of an update (Krizhevsky 2014), and suits Adam
            (Malladi et al. 2022). `none`: not scaled.

    Raises:
        UserError: the rate is not above 0, or there is no such rule.
    """
    check_number("optim.lr", lr, above=0)
    check_choice("lr_scaling", rule, SCALINGS)
    ratio = batch.global_size / batch.reference_size
    scales = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return lr * scales[rule]
