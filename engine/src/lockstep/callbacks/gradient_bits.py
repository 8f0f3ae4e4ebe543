"""The bits of a micro-batch's gradients, before they are added to those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.errors import UserError
from lockstep.patches.torch import BatchNorm
from lockstep.strategies.bit_sums import bit_sum
from lockstep.strategies.exact_sums import AddsGradients
from lockstep.strategies.placing import layout_of

Bits = Tensor  # (3 + tensors,), int64: sums of the bits of tokens, loss, and gradients


class GradientBits:
    """Takes the sum of the bits of each gradient as it arrives, in any strategy with replicas."""

    def __init__(self, model: nn.Module) -> None:
        trained = [(name, weight) for name, weight in model.named_parameters()]
        self.named = {name: weight for name, weight in trained if weight.requires_grad}
        self._sums: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Take sums from now on."""
        for index, weight in enumerate(self.named.values()):
            handle = weight.register_hook(self._hook(index))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def stop(self) -> None:
        """Take no more sums."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """Drop the sums so far."""
        self._sums = {}

    def take(self, batch: Any, loss: Tensor) -> Bits:
        """Return the sums of one micro-batch; a weight without a gradient has 0."""
        zero = torch.zeros((), dtype=torch.int64, device=loss.device)
        sums = [self._sums.get(index, zero) for index in range(len(self.named))]
        self.forget()
        return bits_of(batch, loss, sums)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self._sums[index] = bit_sum(gradient)

        return note


def bits_of(batch: Any, loss: Tensor, sums: list[Tensor]) -> Bits:
    """Return the bits of a micro-batch as one tensor; `sums` are of its gradients."""
    return torch.stack([bits_of_batch(batch, loss.device), bit_sum(loss), *sums])


def bits_of_batch(batch: Any, device: torch.device) -> Tensor:
    """Return the sum of the bits of all tensors in a batch, nested in any plain containers."""
    if isinstance(batch, Tensor):
        return bit_sum(batch)
    parts: list[Any] = []
    if isinstance(batch, Mapping):
        parts = [*batch.values()]
    elif isinstance(batch, list | tuple):
        parts = [*batch]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return sum((bits_of_batch(part, device) for part in parts), start=zero)


def refuse_without_replicas(trainer: Any, callback: str) -> None:
    """Raise a `UserError` if ranks don't have the whole model, and so no gradients of their own."""
    if layout_of(trainer.strategy).has_replicas:
        return
    raise UserError(
        f"the callback {callback} needs the whole model on each rank; set strategy=ddp, or leave "
        "it out"
    )


def refuse_changing_kernels(module: LightningModule) -> None:
    """Raise a `UserError` if computing the same again may give other bits without any fault."""
    if any(isinstance(layer, BatchNorm) for layer in module.modules()):
        raise UserError(
            "the callback Replays computes micro-batches again, which would change the statistics "
            "of the model's BatchNorm; use a norm over channels, or leave the callback out"
        )
    strategy = module.trainer.strategy
    is_exact = isinstance(strategy, AddsGradients) and strategy.exact_threads is not None
    if module.device.type != "cpu" and not is_exact:
        raise UserError(
            "the callback Replays needs kernels that always round alike; set "
            "batch.exact_micro_size, which chooses them, or leave the callback out"
        )
