"""How ranks work together: the choices of configs/strategy/, and what callers ask of any strategy.

A strategy of your own is a function here or elsewhere that `_target_` names. If its ranks don't
each have the whole model, its class has the methods of `ModelLayout`.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lockstep_gpt.distributed.ddp import DDPStrategy, build_ddp
from lockstep_gpt.distributed.exact_sums import SingleDeviceStrategy
from lockstep_gpt.distributed.gradient_norms import norm_of_gradients
from lockstep_gpt.distributed.optimizers import COMPILED
from lockstep_gpt.distributed.tensor_splits import TensorPart


@runtime_checkable
class ModelLayout(Protocol):
    """Where the ranks have the model's weights, gradients, and optimizer state."""

    has_replicas: bool  # whether each rank has all weights, equal on all ranks

    def place_model(self, model: nn.Module, compiled: bool) -> None:
        """Distribute the model over the ranks, and compile it if `compiled`."""

    def whole_model(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module | None:
        """Return all of the model on rank 0, None elsewhere; every rank must call this.

        Args:
            model: whose weights may be spread over ranks.
            build: returns another of its kind.
        """

    def tensor_part(self, weight: nn.Parameter) -> TensorPart | None:
        """Return which part this rank has of `weight`, apart from sharding; None: all of it."""

    def gradient_norm(self, weights: list[nn.Parameter]) -> Tensor:
        """Return the norm of all weights' gradients, by which this rank's can be clipped."""

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return `gradient_norm`'s result as a plain tensor; every rank must call this."""


class WholeModels:
    """The layout of a single device, DDP, and Lightning's other strategies with replicas."""

    has_replicas = True

    def place_model(self, model: nn.Module, compiled: bool) -> None:
        """Compile the model in place, if `compiled`, so that the keys of its state stay."""
        if compiled:
            model.compile(dynamic=False)

    def whole_model(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model."""
        return model

    def tensor_part(self, weight: nn.Parameter) -> None:
        """Return None."""

    def gradient_norm(self, weights: list[nn.Parameter]) -> Tensor:
        """Return the norm of the weights' gradients."""
        return norm_of_gradients(weights)

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm."""
        return norm


@runtime_checkable
class ShardedStates(Protocol):
    """A strategy that can give each rank its own shards of a state, and take them back."""

    def states_in_shards(self) -> AbstractContextManager[None]:
        """Return states as shards in this context."""

    def state_of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank keeps of a checkpoint with shards; `load_checkpoint` accepts it."""


def is_sharded(target: str | None, world_size: int) -> bool:
    """Return whether the strategy that `_target_` names has `ShardedStates` on so many ranks."""
    return world_size > 1 and target == f"{__name__}.fsdp2"


def layout_of(strategy: Strategy) -> ModelLayout:
    """Return the layout of the model under `strategy`, which is often the strategy itself."""
    if isinstance(strategy, ModelLayout):
        return strategy
    return WholeModels()


PLACED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def place(model: nn.Module, strategy: Strategy, *, compiled: bool = False) -> None:
    """Place a model on the ranks, once, and compile it: to call in `configure_model`.

    Args:
        model: whose blocks, if it has `blocks`, are the units that FSDP2 shards.
        strategy: the Trainer's.
        compiled: whether torch compiles the model, and what optimizers such as Muon compute.
    """
    if model not in PLACED:  # a test after training uses the same ranks
        PLACED.add(model)
        if compiled:
            COMPILED.add(model)
        layout_of(strategy).place_model(model, compiled)


def auto(
    *, accelerator: str, world_size: int, exact_threads: int | None = None, **settings: Any
) -> Strategy:
    """Return a single-device strategy for one rank, `ddp` for more."""
    if world_size == 1:
        return single_device(accelerator, exact_threads)
    return ddp(exact_threads=exact_threads, **settings)


def ddp(
    *,
    process_group_backend: str | None,
    timeout_seconds: float,
    comm_hook: str,
    exact_threads: int | None = None,
    **arguments: Any,
) -> DDPStrategy:
    """Return our `DDPStrategy`; configs/strategy/ddp.yaml explains the settings.

    Other arguments go to torch's `DistributedDataParallel`.
    """
    return build_ddp(
        process_group_backend,
        timeout_seconds,
        comm_hook,
        exact_threads=exact_threads,
        **arguments,
    )


def fsdp2(*, accelerator: str, world_size: int, **settings: Any) -> Strategy:
    """Return the strategy that shards over all ranks; with a single rank, nothing is.

    configs/strategy/fsdp2.yaml explains the settings, `fsdp2.build_fsdp2` their types.
    """
    if world_size == 1:
        return single_device(accelerator)
    # Only here: it imports all of torch's DTensor.
    from lockstep_gpt.distributed.fsdp2 import build_fsdp2

    return build_fsdp2(world_size, **settings)


def single_device(accelerator: str, exact_threads: int | None = None) -> SingleDeviceStrategy:
    """Return the strategy of one rank on `accelerator`: cpu, cuda, or mps."""
    device = torch.device("cpu") if accelerator == "cpu" else torch.device(accelerator, 0)
    return SingleDeviceStrategy(device, exact_threads=exact_threads)
