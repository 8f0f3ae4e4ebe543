"""Callbacks by which `verify` computes steps again, and by which its tests flip a bit."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from lockstep.callbacks.seeds import leaf_seed
from lockstep.callbacks.step import StepCallback, ends_epoch
from lockstep.checkpoints.reading import checkpoint_path
from lockstep.evidence.replay import NAMES
from lockstep.run.run import Run

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


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
        self._waits = False  # for the end of an epoch, as `Checkpoints` does

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
            self._waits = ends_epoch(trainer)
            if not self._waits:
                self._save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the state in which the last epoch has ended, if the run did."""
        if self._waits:
            self._waits = False
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        step = trainer.global_step
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


class FlippedBit(Callback):
    """Flips a random bit of one rank, once, however often the run starts.

    Args:
        note: a file that then has the name of the tensor.
        kind: what to change: `weight`, `optimizer`, `gradient`, or `token`.
        step: in the step after this many updates, before its last micro-batch.
        rank: the rank.
        seed: decides the tensor, the number, and the bit.
    """

    def __init__(self, note: str, kind: str, step: int, rank: int = 0, seed: int = 0) -> None:
        self.note = Path(note)
        self.kind = kind
        self.step = step
        self.rank = rank
        self.random = random.Random(seed)
        self._is_due = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Choose a tensor."""
        named = [(name, weight) for name, weight in pl_module.named_parameters()]
        self.name, self.weight = self.random.choice(named)
        if self.kind == "gradient" and trainer.global_rank == self.rank:
            self.weight.register_hook(self._changed_gradient)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Flip the bit, or mark the micro-batch whose gradient gets one."""
        del pl_module
        count = trainer.accumulate_grad_batches
        leaf = 0 if self.kind in ("weight", "optimizer") else count - 1
        self._is_due = (
            (trainer.global_step, batch_idx % count) == (self.step, leaf)
            and trainer.global_rank == self.rank
            and not self.note.exists()
        )
        if not self._is_due or self.kind == "gradient":
            return
        if self.kind == "weight":
            self._flip(self.weight.data)
        elif self.kind == "optimizer":
            state = trainer.optimizers[0].state[self.weight]
            names = [name for name, value in state.items() if getattr(value, "ndim", 0)]
            self._flip(state[self.random.choice(names)])
        else:
            tokens, targets = batch
            place = self.random.randrange(1, tokens.shape[1])
            row = self.random.randrange(len(tokens))
            token = int(tokens[row, place]) ^ 1 << self.random.randrange(8)
            tokens[row, place] = targets[row, place - 1] = token
            self.note.write_text("the tokens", encoding="utf-8")

    def _changed_gradient(self, gradient: Tensor) -> Tensor | None:
        if not self._is_due or self.note.exists():
            return None
        changed = gradient.clone()
        self._flip(changed)
        return changed

    def _flip(self, tensor: Tensor) -> None:
        flip(tensor, self.random)
        self.note.write_text(self.name, encoding="utf-8")


def flip(tensor: Tensor, choice: random.Random) -> None:
    """Flip a random bit of a tensor in place."""
    integers = tensor.view(-1).view(INTEGERS[tensor.itemsize])
    place = choice.randrange(len(integers))
    bit = choice.randrange(8 * tensor.itemsize)
    mask = 1 << bit
    if bit == 8 * tensor.itemsize - 1:
        mask = -mask  # the sign, in two's complement
    integers[place] ^= mask
