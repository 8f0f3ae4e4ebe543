"""The warmup of a quick try: a run that is too short for the warmup of its preset."""

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lockstep_gpt.config import Config
from lockstep_gpt.settings import counted
from lockstep_gpt.training import schedule
from lockstep_gpt.training.schedule import BatchPlan

WARMUPS = ("optim.warmup_steps", "optim.warmup_tokens")


def fit_warmup(
    values: dict[str, Any], config: Config, batch: BatchPlan, words: Iterable[str]
) -> tuple[dict[str, Any], Config]:
    """Return a new run's settings, with a warmup that is shorter than the run.

    A warmup on the command line stays as it is: `plan_schedule` refuses one that doesn't fit.

    Args:
        values: what would be frozen.
        config: the same, checked.
        batch: how many tokens a step has.
        words: the overrides on the command line.
    """
    typed = {word.partition("=")[0].lstrip("+~") for word in words}
    if typed.intersection(WARMUPS):
        return values, config
    shorter: dict[str, Any] = schedule.shorten_warmup(config, batch)
    for name, value in shorter.items():
        if os.environ.get("RANK", "0") == "0":  # only one of a launcher's ranks prints
            steps = counted(schedule.plan_steps(config, batch), "step")
            logging.info(
                "optim.%s=%d, which is not from the command line, takes all of this run of %s; it "
                "is now %d, a tenth of the run; to choose it, set optim.%s",
                *(name, getattr(config.optim, name), steps, value, name),
            )
    optim = replace(config.optim, **shorter)
    return {**values, "optim": {**values["optim"], **shorter}}, replace(config, optim=optim)


def is_shortened(name: str, frozen: Any, composed: Any) -> bool:
    """Return whether a run's setting may be this composed one, shortened when the run began."""
    return name in WARMUPS and None not in (frozen, composed) and frozen < composed
