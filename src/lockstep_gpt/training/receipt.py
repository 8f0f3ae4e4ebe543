"""The receipt: what a run is about to do, said before its first step."""

from __future__ import annotations

from lockstep_gpt.config import Config
from lockstep_gpt.training.schedule import BatchPlan, Schedule

RULES = {
    "linear": "linear in the batch",
    "sqrt": "square root of the batch",
    "none": "not scaled",
}


def receipt(
    config: Config, batch: BatchPlan, schedule: Schedule, facts: dict[str, str]
) -> dict[str, str]:
    """Return label -> line.

    Args:
        config: the run's settings.
        batch: how an optimizer step spreads over ranks.
        schedule: the learning rate over the run.
        facts: lines that only the running rank knows, put around ours.
    """
    return {
        "run": f"{config.run_name} in {config.run_dir}",
        **facts,
        "precision": config.precision + (", compiled" if config.compile else ""),
        "batch": _batch(batch),
        "budget": _budget(batch, schedule),
        "lr": _lr(config, batch, schedule),
        "schedule": _schedule(config, batch, schedule),
    }


def as_text(lines: dict[str, str]) -> str:
    """Lay the receipt out in two columns."""
    width = max(map(len, lines))
    return "\n".join(f"  {label:<{width}}  {line}" for label, line in lines.items())


def _batch(batch: BatchPlan) -> str:
    return (
        f"{batch.devices} device{'s' * (batch.devices > 1)} x "
        f"{batch.nodes} node{'s' * (batch.nodes > 1)} x {batch.micro_size} samples x "
        f"{batch.accumulation} accumulation = {batch.global_size} samples = "
        f"{batch.tokens_per_step:,} tokens per step"
    )


def _budget(batch: BatchPlan, schedule: Schedule) -> str:
    tokens = schedule.total_steps * batch.tokens_per_step
    return f"{schedule.total_steps:,} steps = {tokens:,} tokens"


def _lr(config: Config, batch: BatchPlan, schedule: Schedule) -> str:
    rule = RULES[config.optim.lr_scaling]
    why = f"{rule}: {batch.global_size} samples, found at {config.batch.reference_size}"
    return f"{schedule.base_lr:g} x {schedule.scale:g} = {schedule.peak_lr:g} ({why})"


def _schedule(config: Config, batch: BatchPlan, schedule: Schedule) -> str:
    warmup = f"{schedule.warmup_steps:,} steps = {_tokens(schedule.warmup_steps, batch)} of warmup"
    if config.optim.decay == "constant":
        return f"{warmup}, then constant"
    final = schedule.lr(schedule.total_steps - 1)
    decay = f"{schedule.decay_steps:,} steps = {_tokens(schedule.decay_steps, batch)}"
    return f"{warmup}, {config.optim.decay} decay over the last {decay} to {final:g}"


def _tokens(steps: int, batch: BatchPlan) -> str:
    return f"{steps * batch.tokens_per_step:,} tokens"
