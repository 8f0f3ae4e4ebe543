"""Normalizes the loss of a step by what counts, over all ranks and micro-batches.

A `training_step` returns the mean over what counts in a micro-batch, such as the targets that
aren't padding. Each mean weighs here as much as its number of them. Where all have the same number,
the mean of means is the same.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoints.finite_states import own_part

# Of a count that is no integer, such as a sum of weights: it is added in integers, since a sum of
# fractions would round by the order of the ranks.
PARTS_OF_ONE = 1 << 20


class CountTargets(Callback):
    """Weighs each micro-batch by what counts in it, and divides by that of the step.

        CountTargets(lambda batch: (batch["labels"] != -100).sum())

    List it before callbacks that read or clip gradients.

        >>> counting = lockstep.CountTargets(lambda batch: (batch["labels"] != -100).sum())
        >>> trainer = Trainer(callbacks=[counting])

    Args:
        count: returns how many targets of a batch count, as a scalar tensor on its device; or the
            sum of their weights, which is rounded to a millionth.
        typical: a typical number of them; it only scales gradients until the division.
    """

    def __init__(self, count: Callable[[Any], Tensor], typical: int = 1) -> None:
        self.count = count
        # Weights are counts divided by this. A power of two doesn't round, so the bits of a step
        # don't depend on how its micro-batches are spread over ranks.
        self.unit = 1 << (typical - 1).bit_length()
        self.counts: list[Tensor] = []  # of each micro-batch of the step on this rank
        self.total = torch.zeros(())  # of the step, over all ranks after `pending`
        self.pending: Any = None
        self._is_added = False  # whether `total` is of this step
        # Of what it multiplies with: at least that of the gradients, not to round them.
        self.dtype = torch.float32
        self.factor = torch.ones(())  # by which gradients were multiplied at the end of the step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the type of the gradients."""
        dtypes = {weight.dtype for weight in pl_module.parameters() if weight.requires_grad}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the targets; in the last micro-batch, start to add the counts of all ranks."""
        leaf = batch_idx % trainer.accumulate_grad_batches
        if leaf == 0:
            self.counts = []
            self._is_added = False
        self.counts.append(self.count(batch))
        if leaf == trainer.accumulate_grad_batches - 1:
            self._start_to_add(trainer)

    def _start_to_add(self, trainer: Trainer) -> None:
        self.total = torch.stack(self.counts)
        if self.total.is_floating_point():
            wide = torch.promote_types(self.total.dtype, torch.float32)
            self.total = (self.total.to(wide) * PARTS_OF_ONE).round().long()
        self.total = self.total.sum()
        if trainer.world_size > 1:  # ranks that split a model all count, here and below
            self.pending = dist.all_reduce(self.total, async_op=True)
        self._is_added = True

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Multiply the gradient of the mean by the count; an integer rounds nothing."""
        weight = self.counts[-1].to(self.dtype) / self.unit
        loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
    ) -> None:
        """Divide the gradients by the count of the step."""
        if not self._is_added:  # the epoch has ended within the step
            self._start_to_add(trainer)
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        batches = trainer.world_size * trainer.accumulate_grad_batches  # whose mean is taken
        total = self.total.clamp(min=1).to(self.dtype)
        if self.counts[-1].is_floating_point():
            total /= PARTS_OF_ONE
        share = batches / total
        self.factor = share * self.unit
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_mul_([own_part(gradient) for gradient in gradients], self.factor)
