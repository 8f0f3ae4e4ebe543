"""Normalizes the loss of a step by its number of targets, over all ranks and micro-batches.

A model returns the mean over a micro-batch's targets that are not `IGNORE`. Each mean counts here
as often as it has targets. Where all targets count, the mean of means is the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch import Tensor

from lockstep_gpt.config import Config
from lockstep_gpt.model.functional import IGNORE


class CountedTargets(Callback):
    """Weighs each micro-batch by its targets, and divides the gradients by those of the step.

    It leaves runs in which every target counts.
    """

    def __init__(self, config: Config) -> None:
        samples = config.batch.micro_size or config.batch.global_size or 1
        tokens = samples * config.model.block_size
        # Weights are counts divided by this. A power of two doesn't round, so the bits of a step
        # don't depend on how its micro-batches are spread over ranks.
        self.unit = 1 << (tokens - 1).bit_length()
        self.counts: list[Tensor] = []  # of each micro-batch of the step on this rank
        self.total = torch.zeros(())  # of the step, over all ranks after `pending`
        self.pending: Any = None
        # Of what it multiplies with: at least that of the gradients, not to round them.
        self.dtype = torch.float64 if config.precision == "64-true" else torch.float32
        self.factor = torch.ones(())  # by which gradients were multiplied at the end of the step

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave a run in which each target counts: it must not wait for the ranks' counts."""
        if not getattr(trainer.datamodule, "may_ignore", True):
            # A new list: Lightning is iterating over the old one.
            others = [callback for callback in trainer.callbacks if callback is not self]
            trainer.callbacks = others

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the targets; in the last micro-batch, start to add the counts of all ranks."""
        leaf = batch_idx % trainer.accumulate_grad_batches
        if leaf == 0:
            self.counts = []
        self.counts.append((batch[1] != IGNORE).sum())
        if leaf == trainer.accumulate_grad_batches - 1:
            self.total = torch.stack(self.counts).sum()
            if trainer.world_size > 1:  # ranks that split a model all count, here and below
                self.pending = dist.all_reduce(self.total, async_op=True)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        """Multiply the gradient of the mean by the count: an integer, which rounds nothing."""
        weight = self.counts[-1].to(self.dtype) / self.unit
        loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: Any,
        optimizer: Any,
    ) -> None:
        """Divide the gradients, and the losses for the log, by the count of the step."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        batches = trainer.world_size * trainer.accumulate_grad_batches  # whose mean is taken
        share = batches / self.total.clamp(min=1).to(self.dtype)
        self.factor = share * self.unit
        gradients = [weight.grad for weight in pl_module.trained if weight.grad is not None]
        torch._foreach_mul_([_local(gradient) for gradient in gradients], self.factor)
        pl_module.losses.weigh([count * share for count in self.counts])


def _local(gradient: Any) -> Tensor:
    """Return this rank's part of a gradient: under FSDP2 its shard, otherwise all of it."""
    if hasattr(gradient, "to_local"):  # a DTensor, whose import takes time
        gradient = gradient.to_local()
    return gradient  # type: ignore[no-any-return]
