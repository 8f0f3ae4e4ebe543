"""What a rank also does on an Apple GPU."""

from typing import Any

import torch
from lightning import Callback, Trainer
from torch.nn.utils import get_total_norm

from lockstep_gpt.errors import RunError
from lockstep_gpt.training.seeds import leaf_seed


class AppleGPU(Callback):
    """Seeds its random numbers, and ends a run before a non-finite update."""

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Make dropout a function of seed, step, and micro-batch, as on other devices."""
        leaf = batch_idx % trainer.accumulate_grad_batches
        torch.mps.manual_seed(leaf_seed(pl_module.config.seed, trainer.global_step, leaf))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Raise a `RunError` if a gradient is not finite: fused kernels there would apply it."""
        gradients = [weight.grad for weight in pl_module.trained if weight.grad is not None]
        norm = get_total_norm(gradients)
        if not bool(norm.isfinite()):
            step = trainer.global_step
            raise RunError(
                f"step {step + 1}: the gradient is not finite; the weights are those of step "
                f"{step}; lower optim.lr"
            )
