"""Whether a state is worth keeping: its weights and moments are finite on all ranks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import RunError
from lockstep.ranks.ranks import from_each_rank, from_rank_zero


@dataclass(frozen=True, order=True)
class Broken:
    """A tensor of a state that is infinite or not a number somewhere."""

    place: int  # among all tensors of the state, the weights first
    what: str  # it is


def refuse_broken_state(trainer: Trainer, newest: Callable[[], Path | None]) -> None:
    """Raise a `RunError` on all ranks if the state of one of them is not finite.

    Nobody could resume from it: the next update spreads what is infinite or not a number. Every
    rank must call this; each looks at its own shards.

    Args:
        trainer: has the module and its optimizers.
        newest: returns the newest checkpoint so far, which stays; rank 0's is named.
    """
    found = from_each_rank(first_broken(trainer.lightning_module, trainer.optimizers))
    broken = min(filter(None, found), default=None)
    if broken is None:
        return
    remedy = "there is no checkpoint yet; lower the learning rate"
    good = from_rank_zero(newest())
    if good is not None:
        remedy = f"the newest good checkpoint is {good}; continue from it with a lower rate"
    raise RunError(
        f"step {trainer.global_step}: {broken.what} is not finite, so this state isn't kept; "
        f"{remedy}"
    )


def first_broken(module: nn.Module, optimizers: Iterable[Optimizer]) -> Broken | None:
    """Return the first tensor of this rank's weights and moments that is not finite.

    It waits for the device once. Buffers may be infinite, as a mask is.
    """
    tensors = [*_weights_of(module), *_moments_of(module, optimizers)]
    if not tensors:
        return None
    with torch.no_grad():
        # A sum takes a tenth of the time of `isfinite`. One of finite numbers may be infinite, too;
        # one of others never is finite.
        sums = [summed(tensor) for _, tensor in tensors]
        if torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all():
            return None
        for index, (what, tensor) in enumerate(tensors):
            if not sums[index].isfinite() and not real(tensor).isfinite().all():
                return Broken(index, what)
    return None


def _weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight as this rank has it, with its name."""
    for name, weight in module.named_parameters():
        if is_inexact(weight):
            yield name, own_part(weight)


def _moments_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield optimizers' tensors; a single number may be infinite, such as a best loss so far."""
    names: dict[Tensor, str] = {weight: name for name, weight in module.named_parameters()}
    for optimizer in optimizers:
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and is_inexact(value):
                    yield f"the optimizer's {key} of {names.get(weight)}", own_part(value)


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers may be infinite."""
    return tensor.is_floating_point() or tensor.is_complex()


def own_part(tensor: Any) -> Tensor:
    """Return a tensor in this rank's memory: of a sharded one, its shard."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    assert isinstance(tensor, Tensor)
    return tensor


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers in 32 bits, as a tensor."""
    return real(tensor).sum(dtype=torch.float32)


def real(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in a type that torch can test: real, and of 16 bits or more."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.itemsize == 1 else tensor
