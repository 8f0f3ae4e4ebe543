"""The arithmetic of a run: tokens per step, steps, and learning rates, as functions of settings."""

import math
from dataclasses import dataclass

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.exact_sizes import refuse_other_world_sizes
from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import counted
from lockstep_gpt.training.batch_settings import BatchConfig


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples are spread over nodes, devices, and micro-steps."""

    micro_size: int  # samples per device and micro-step
    devices: int  # per node
    nodes: int
    accumulation: int  # micro-steps per optimizer step
    block_size: int  # tokens per sample; 0: samples that have none
    tensor_parallel: int = 1  # ranks that split a model, and have the same samples

    @property
    def world_size(self) -> int:
        """Total ranks."""
        return self.devices * self.nodes

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of ranks, that have samples of their own."""
        return self.world_size // self.tensor_parallel

    @property
    def global_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_size * self.data_parallel * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks; 0 if samples have none."""
        return self.global_size * self.block_size


def plan_batch(
    batch: BatchConfig, block_size: int, devices: int, nodes: int, tensor_parallel: int = 1
) -> BatchPlan:
    """Spread `batch` over `nodes` of `devices` ranks each, of which groups have the same samples.

    Accumulation reaches a fixed `global_size`, so more devices mean fewer micro-steps, or, without
    a `micro_size`, smaller ones. Without a `global_size`, there is one micro-step, and the global
    batch grows with the devices. Raise a `UserError` if no whole number fits.
    """
    data_parallel = data_parallel_size(devices, nodes, tensor_parallel)
    micro_size = batch.micro_size or max(1, (batch.global_size or 0) // data_parallel)
    micro_step = micro_size * data_parallel
    accumulation, rest = divmod(batch.global_size or micro_step, micro_step)
    refuse_other_world_sizes(batch.exact_micro_size, batch.global_size, data_parallel)
    if rest or not accumulation:
        raise UserError(_indivisible_line(batch, devices, nodes, tensor_parallel))
    return BatchPlan(micro_size, devices, nodes, accumulation, block_size, tensor_parallel)


def data_parallel_size(devices: int, nodes: int, tensor_parallel: int) -> int:
    """Return how many groups of `tensor_parallel` ranks there are; a `UserError` if some lack."""
    groups, rest = divmod(devices * nodes, tensor_parallel)
    if rest or not groups:
        raise UserError(
            f"strategy.tensor_parallel={tensor_parallel} does not divide "
            f"{ranks_text(devices, nodes)}; use trainer.devices={tensor_parallel} or a multiple, "
            "or lower it"
        )
    return groups


def ranks_text(devices: int, nodes: int, tensor_parallel: int = 1) -> str:
    """Return how many ranks have samples of their own, as factors: `2 devices x 1 node`."""
    text = f"{counted(devices, 'device')} x {counted(nodes, 'node')}"
    if tensor_parallel > 1:
        text += f" / {tensor_parallel} tensor-parallel"
    return text


def _indivisible_line(batch: BatchConfig, devices: int, nodes: int, tensor_parallel: int) -> str:
    assert batch.global_size is not None
    data_parallel = devices * nodes // tensor_parallel
    micro_step = (batch.micro_size or 1) * data_parallel
    below = batch.global_size // micro_step * micro_step
    nearest = [size for size in (below, below + micro_step) if size > 0]
    micro = f"batch.micro_size={batch.micro_size} x " if batch.micro_size else ""
    line = (
        f"batch.global_size={batch.global_size} is not divisible by {micro}"
        f"{ranks_text(devices, nodes, tensor_parallel)} = {micro_step}; "
        f"nearest: batch.global_size={' or '.join(map(str, nearest))}"
    )
    per_rank, rest = divmod(batch.global_size, data_parallel)
    if rest or batch.micro_size is None or per_rank == 0:
        return line
    fits = next(size for size in range(batch.micro_size, 0, -1) if per_rank % size == 0)
    return f"{line}, or keep it with batch.micro_size={fits}"


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step; steps count from 0, the first update."""

    total_steps: int
    warmup_steps: int
    decay: str  # cosine, linear, constant, or wsd
    decay_steps: int  # the last steps of the run, in which the rate falls; 0 for constant
    base_lr: float  # as configured, at the reference batch
    scale: float  # factor for the global batch
    final_lr_fraction: float  # rate of the last step, as a fraction of the peak

    @property
    def peak_lr(self) -> float:
        """The highest learning rate of the run."""
        return self.base_lr * self.scale

    def lr(self, step: int) -> float:
        """Return the learning rate of update `step`."""
        return self.peak_lr * self.factor(step)

    def factor(self, step: int) -> float:
        """Return `lr(step)` as a fraction of the peak.

        The warmup rises linearly and reaches the peak in its last step. The decay reaches
        `final_lr_fraction` in the last step of the run, and stays there.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return 1.0
        ahead = (self.total_steps - 1 - step) / self.decay_steps  # fraction of the decay left
        ahead = min(1.0, max(0.0, ahead))
        if self.decay == "cosine":
            ahead = (1 - math.cos(math.pi * ahead)) / 2
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * ahead


def plan_steps(config: Config, batch: BatchPlan) -> int:
    """Return the optimizer steps of a run, whose budget may be in tokens."""
    return _steps(config.max_steps, config.max_tokens, batch)


def longer_budget(config: Config, times: int) -> str:
    """Return the setting, as typed, that makes a run so many times as long."""
    budget = "max_steps" if config.max_steps is not None else "max_tokens"
    return f"{budget}={times * getattr(config, budget)}"


def plan_schedule(config: Config, batch: BatchPlan) -> Schedule:
    """Turn budgets in steps or tokens into a run's schedule.

    A run that is no longer than its warmup, such as a quick try of a preset, warms up for a tenth
    of its steps instead; one of fewer than 10 steps, not at all.

    Sources: linear scaling and warmup, Goyal et al. 2017; cosine, Loshchilov & Hutter 2017; wsd
    (warmup, stable, decay), Zhai et al. 2022 and Hu et al. 2024.
    """
    total_steps = plan_steps(config, batch)
    warmup_steps = _steps(config.optim.warmup_steps, config.optim.warmup_tokens, batch)
    if warmup_steps >= total_steps:
        warmup_steps = total_steps // 10
    return Schedule(
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        decay=config.optim.decay,
        decay_steps=_decay_steps(config, total_steps, warmup_steps),
        base_lr=config.optim.lr,
        scale=scale_of_rate(config, batch),
        final_lr_fraction=config.optim.final_lr_fraction,
    )


def scale_of_rate(config: Config, batch: BatchPlan) -> float:
    """Return the factor of the learning rate for this batch; 1 at `batch.reference_size`."""
    ratio = batch.global_size / config.batch.reference_size
    scales = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return scales[config.optim.lr_scaling]


def _steps(steps: int | None, tokens: int | None, batch: BatchPlan) -> int:
    """Return a budget in steps, rounding tokens up to whole steps; 0 without a budget."""
    if steps is not None:
        return steps
    if tokens is None:
        return 0
    return -(-tokens // batch.tokens_per_step)


def _decay_steps(config: Config, total_steps: int, warmup_steps: int) -> int:
    if config.optim.decay == "constant":
        return 0
    longest = max(1, total_steps - max(1, warmup_steps))  # after the first step at the peak
    if config.optim.decay == "wsd":
        return min(longest, max(1, round(config.optim.decay_fraction * total_steps)))
    return longest
