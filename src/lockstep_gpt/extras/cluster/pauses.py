"""Predict how much of a run goes into validation and saving, between its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster.hardware import Hardware
from lockstep_gpt.extras.cluster.memory import States
from lockstep_gpt.extras.cluster.step_time import BACKWARD_SHARE, StepTime
from lockstep_gpt.run.planned_pauses import saves_after, validations_after
from lockstep_gpt.training.schedule import BatchPlan


@dataclass(frozen=True)
class Pauses:
    """How often a run validates and saves, and how many seconds each takes."""

    validations: int
    validation: float | None  # None: without `data.val_tokens`, its size is unknown
    saves: int
    save: float

    def share(self, training: float) -> float:
        """Return the fraction of a run whose steps take `training` seconds together."""
        seconds = self.validations * (self.validation or 0.0) + self.saves * self.save
        return seconds / (training + seconds)


def pauses(
    config: Config,
    batch: BatchPlan,
    time: StepTime,
    states: States,
    hardware: Hardware,
    steps: float,
) -> Pauses:
    """Return the pauses of a run of that many steps.

    A validation is the forward pass of `data.val_tokens`, divided among all devices. A save copies
    weights and moments from rank 0's device to the host; unless `checkpoint.background` is true, it
    also waits for the disk. Each validation counts as the best so far.
    """
    last = math.ceil(steps)
    size = states.weights + states.optimizer
    save = size / hardware.host_link.bandwidth
    if not config.checkpoint.background:
        save += size / hardware.disk
    validation = None
    tokens = getattr(config.data, "val_tokens", None)
    if tokens is not None:
        micro_batches = math.ceil(tokens / (batch.tokens_per_step / batch.accumulation))
        forward = (1 - BACKWARD_SHARE) * time.compute / batch.accumulation
        validation = micro_batches * forward
    return Pauses(
        validations_after(0, config, last), validation, saves_after(0, config, last), save
    )
