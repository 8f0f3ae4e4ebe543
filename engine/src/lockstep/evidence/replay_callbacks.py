"""What a replay does besides training: it saves where the run did, and ends at a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from lockstep.callbacks.seeds import leaf_seed
from lockstep.callbacks.step import StepCallback
from lockstep.checkpoints.reading import checkpoint_path
from lockstep.evidence.replay import NAMES
from lockstep.run.run import Run


class ReplayedSaves(StepCallback):
    """Saves after the same steps as the run did.

    Args:
        saves: the steps.
        end: the step after which to stop.
    """

    def __init__(self, saves: Sequence[int], end: int) -> None:
        self.directory = Run.current().directory
        self.saves = [*saves]
        self.end = end

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the names of the tensors, which the state of an optimizer has as numbers."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            names = {id(weight): name for name, weight in pl_module.named_parameters()}
            groups = [group for some in trainer.optimizers for group in some.param_groups]
            ordered = [names[id(weight)] for group in groups for weight in group["params"]]
            (self.directory.path / NAMES).write_text(json.dumps(ordered), encoding="utf-8")

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Save if the run did; at the end, the Trainer stops, and the last state is saved."""
        if step == self.end:
            trainer.should_stop = True
        elif step in self.saves:
            trainer.save_checkpoint(checkpoint_path(self.directory.checkpoints, step))


class RoundingNoise(Callback):
    """Computes each step's gradient with weights that have one more rounding error each.

    So what differs from a run without it shows how far rounding errors of this size grow. Before
    the update, the weights get their own bits again. This is Monte Carlo arithmetic (Parker 1997)
    on the inputs of a step.

    Args:
        seed: of the random errors.
        size: the largest relative error.
    """

    def __init__(self, seed: int, size: float) -> None:
        self.seed = seed
        self.size = size
        self._before: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Before the first micro-batch of a step, add the errors."""
        del batch
        if batch_idx % trainer.accumulate_grad_batches:
            return
        generator = torch.Generator(pl_module.device)
        generator.manual_seed(leaf_seed(self.seed, trainer.global_step, -2))
        with torch.no_grad():
            for weight in pl_module.parameters():
                values = _local(weight)
                self._before.append(values.clone())
                noise = torch.rand(values.shape, generator=generator, device=values.device)
                values.mul_(1 + (2 * noise - 1) * self.size)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Remove the errors."""
        with torch.no_grad():
            for weight, before in zip(pl_module.parameters(), self._before, strict=True):
                _local(weight).copy_(before)
        self._before = []


def _local(weight: Any) -> Tensor:
    """Return this rank's part of a weight: under FSDP2 its shard, otherwise all of it."""
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    return weight.data  # type: ignore[no-any-return]
