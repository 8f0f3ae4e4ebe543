"""Writes `trace.csv`: the bits of each step, so that a comparison names the first difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.callbacks.gradient_bits import (
    Bits,
    GradientBits,
    refuse_without_replicas,
)
from lockstep.callbacks.step import StepCallback
from lockstep.metrics.trace_file import TraceFile, TraceRow, as_digits
from lockstep.ranks.ranks import tensors_of_ranks
from lockstep.run.run import Run
from lockstep.settings import check_whole
from lockstep.strategies.bit_sums import bit_sum
from lockstep.strategies.gradient_norms import norm_of_gradients


class Trace(StepCallback):
    """Keeps the bits of steps on the device, and gathers and writes them every so many steps.

    Args:
        every: steps between writes to the disk.
    """

    def __init__(self, every: int = 10) -> None:
        check_whole("every", every, at_least=1)
        self.directory = Run.current().directory
        self.every = every
        self._batch: Any = None
        self._own_norm: Tensor | None = None
        self._micro_batches: list[Bits] = []  # of the current step, on this rank
        self._steps: dict[int, Tensor] = {}  # step -> its bits on this rank, not written yet

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue the file, and watch the gradients."""
        super().on_train_start(trainer, pl_module)
        refuse_without_replicas(trainer, "Trace")
        clipping = [each for each in trainer.callbacks if isinstance(each, ClipAndSkip)]
        self._clipping = clipping[0] if clipping else None
        self._bits = GradientBits(pl_module)
        self._file = TraceFile(self.directory, self._bits.named)
        if trainer.is_global_zero:
            self._file.truncate_after(trainer.global_step)
        self._bits.watch()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the micro-batch; DDP has arranged its buckets with another one."""
        del pl_module
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._micro_batches = []
            self._memory = self._sums_of_memory(trainer)
        self._bits.forget()
        self._batch = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Note the loss, which Lightning has divided."""
        self._loss = loss.detach() * trainer.accumulate_grad_batches

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Take the bits of the micro-batch."""
        self._micro_batches.append(self._bits.take(self._batch, self._loss))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure the gradient, unless a callback does it that clips it, too."""
        if self._clipping is None:
            self._own_norm = norm_of_gradients(self._bits.named.values())

    def on_step_end(self, trainer: Any, pl_module: Any, step: int) -> None:
        """Keep the bits of the step; write those so far if a row of the log is due."""
        micro_batches = torch.stack(self._micro_batches)  # (A, 2 + tensors)
        gradients = micro_batches[:, 2:]
        norm = self._own_norm if self._clipping is None else self._clipping.norm
        assert norm is not None
        parts = [bit_sum(norm)[None], *micro_batches[:, :2].T]
        tensors = [gradients.sum(dim=0), self._memory]
        self._steps[step] = torch.cat([*parts, gradients.sum(dim=1), *tensors])
        if step % self.every == 0 or step == trainer.max_steps:
            self._write(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Write the bits of all steps up to the one that is saved: a resumed run goes on there."""
        self._write(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching."""
        self._bits.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching."""
        if hasattr(self, "_bits"):
            self._bits.stop()

    def _sums_of_memory(self, trainer: Any) -> Tensor:
        """Return the sums of the bits of all weights, then of the optimizer's state of each."""
        weights = [*self._bits.named.values()]
        zero = torch.zeros((), dtype=torch.int64, device=weights[0].device)
        states = []
        for weight in weights:
            saved = trainer.optimizers[0].state.get(weight, {}).values()
            # Each rank counts the steps itself, also of a tensor whose momentum another one keeps.
            tensors = [value for value in saved if isinstance(value, Tensor) and value.ndim]
            states.append(sum(map(bit_sum, tensors), start=zero))
        return torch.stack([*map(bit_sum, weights), *states])

    def _write(self, trainer: Any) -> None:
        """Gather the bits of all ranks, and write them; all ranks must call this."""
        if not self._steps:
            return
        steps = [*self._steps]
        ranks = tensors_of_ranks(torch.stack([*self._steps.values()])).cpu()  # (ranks, steps, n)
        self._steps = {}
        if trainer.is_global_zero:
            count = trainer.accumulate_grad_batches
            self._file.append(_row(step, ranks[:, i], count) for i, step in enumerate(steps))


def _row(step: int, ranks: Tensor, count: int) -> TraceRow:
    """Return the row of a step.

    Args:
        step: the optimizer step.
        ranks: the bits of each rank, (ranks, n).
        count: micro-batches of a rank.
    """
    fixed = 1 + 3 * count
    tokens, losses, gradients = ranks[:, 1:fixed].view(-1, 3, count).transpose(0, 1)
    of_tensors = ranks[:, fixed:].view(len(ranks), 3, -1)  # gradients, weights, states
    weights = one_of_ranks(of_tensors[:, 1])
    states = one_of_ranks(of_tensors[:, 2])
    numbers = [tokens, losses, gradients, of_tensors[:, 0].sum(dim=0), weights, states]
    return TraceRow(step, as_digits(int(ranks[0, 0])), *map(_digits, numbers))


def one_of_ranks(sums: Tensor) -> Tensor:
    """Return one of the ranks' sums for each tensor, (ranks, tensors) -> (tensors,).

    A rank without the tensor has 0. All others should have the same; if not, it is one that differs
    from the first.
    """
    is_there = sums != 0
    first = sums.gather(0, is_there.int().argmax(dim=0, keepdim=True))
    differs = is_there & (sums != first)
    other = sums.gather(0, differs.int().argmax(dim=0, keepdim=True))
    return torch.where(differs.any(dim=0, keepdim=True), other, first)[0]


def _digits(numbers: Tensor) -> list[str]:
    return [as_digits(number) for number in numbers.flatten().tolist()]
