"""Flips one bit on purpose, as failing memory would: a callback for tests of `verify`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
