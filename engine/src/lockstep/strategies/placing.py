"""How ranks work together: the choices of configs/strategy/, and what callers ask of any strategy.

A strategy of your own is a function here or elsewhere that `_target_` names. If its ranks don't
each have the whole model, its class has the methods of `ModelLayout`.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.ranks.ranks import LONGEST_WAIT, Ranks
from lockstep.settings import (
    check,
    check_choice,
    check_number,
    check_switch,
    check_whole,
    counted,
)
from lockstep.strategies.ddp import COMM_HOOKS, DDPStrategy, comm_hook_of
from lockstep.strategies.exact_sums import SingleDeviceStrategy
from lockstep.strategies.gradient_norms import norm_of_gradients
from lockstep.strategies.optimizers import COMPILED

BACKENDS = (None, "nccl", "gloo", "mpi")
SHARD_DTYPES = ("float32", "bfloat16")
BUCKET_MB = 25.0  # torch's own default


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

    def gradient_norm(self, weights: list[nn.Parameter]) -> Tensor:
        """Return the norm of all weights' gradients; every rank must call this."""


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

    def gradient_norm(self, weights: list[nn.Parameter]) -> Tensor:
        """Return the norm of the weights' gradients."""
        return norm_of_gradients(weights)


@runtime_checkable
class ShardedStates(Protocol):
    """A strategy that can give each rank its own shards of a state, and take them back."""

    def states_in_shards(self) -> AbstractContextManager[None]:
        """Return states as shards in this context."""

    def state_of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank keeps of a checkpoint with shards; `load_checkpoint` accepts it."""


def layout_of(strategy: Strategy) -> ModelLayout:
    """Return the layout of the model under `strategy`, which is often the strategy itself."""
    if isinstance(strategy, ModelLayout):
        return strategy
    return WholeModels()


PLACED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def place(model: nn.Module, strategy: Strategy, *, compiled: bool = False) -> None:
    """Place a model on the ranks, once, and compile it: to call in `configure_model`.

        >>> model = torch.nn.Linear(2, 2)
        >>> lockstep.place(model, Trainer(devices=1).strategy)

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
    batch: Batch | None = None,
    *,
    process_group_backend: str | None = None,
    timeout_seconds: float = LONGEST_WAIT,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
    bucket_cap_mb: float = BUCKET_MB,
    split_graph: bool | str = "auto",
    static_graph: bool = False,
    comm_hook: str = "none",
) -> Strategy:
    """Return a strategy without a wrapper for one rank, `ddp` for more.

    Args:
        batch: says whether gradients are added in one order on any number of ranks.
        process_group_backend: as for `ddp`, like all that follow.
        timeout_seconds: longest wait for another rank.
        find_unused_parameters: whether some steps don't use some parameters.
        gradient_as_bucket_view: whether gradients are views of the buckets.
        bucket_cap_mb: size of a bucket.
        split_graph: whether a compiled model is cut at the buckets.
        static_graph: whether each step uses the same parameters.
        comm_hook: compression of gradients.
    """
    strategy = ddp(
        batch,
        process_group_backend=process_group_backend,
        timeout_seconds=timeout_seconds,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        bucket_cap_mb=bucket_cap_mb,
        split_graph=split_graph,
        static_graph=static_graph,
        comm_hook=comm_hook,
    )
    if Ranks.from_environment().world_size == 1:
        return SingleDeviceStrategy(exact_threads=threads_of(batch))
    return strategy


def ddp(
    batch: Batch | None = None,
    *,
    process_group_backend: str | None = None,
    timeout_seconds: float = LONGEST_WAIT,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
    bucket_cap_mb: float = BUCKET_MB,
    split_graph: bool | str = "auto",
    static_graph: bool = False,
    comm_hook: str = "none",
) -> DDPStrategy:
    """Return our `DDPStrategy`: each rank has the whole model, and they average gradients.

        >>> batch = lockstep.Batch(global_size=8, exact_micro_size=2).spread_over(devices=2)
        >>> trainer = Trainer(devices=2, strategy=lockstep.DDP(batch))

    Args:
        batch: says whether gradients are added in one order on any number of ranks.
        process_group_backend: nccl, gloo, or mpi; None: nccl on GPUs, gloo elsewhere.
        timeout_seconds: longest wait for another rank.
        find_unused_parameters: set it if some parameters are unused in some steps.
        gradient_as_bucket_view: False: the buckets are a second copy of the gradients.
        bucket_cap_mb: gradients are sent in buckets of so many MiB.
        split_graph: whether a compiled model is cut at the buckets, which are then sent during
            backward; `auto`: for several machines without accumulation.
        static_graph: a promise to torch that each step uses the same parameters.
        comm_hook: compression of gradients: none, fp16, bf16, or powersgd.

    Raises:
        UserError: a value is not one of its choices, or doesn't go with exact sums.
    """
    check_connection(process_group_backend, timeout_seconds)
    check_switch("find_unused_parameters", find_unused_parameters)
    check_switch("gradient_as_bucket_view", gradient_as_bucket_view)
    check_number("bucket_cap_mb", bucket_cap_mb, above=0)
    check_choice("split_graph", split_graph, (True, False, "auto"))
    check_switch("static_graph", static_graph)
    check_choice("comm_hook", comm_hook, COMM_HOOKS)
    exact_threads = threads_of(batch)
    if exact_threads is not None:
        rule = "adds gradients in rank order; set batch.exact_micro_size=null, or"
        check("comm_hook", comm_hook, comm_hook == "none", f"{rule} comm_hook=none")
        name, value = "find_unused_parameters", find_unused_parameters
        check(name, value, not value, f"{rule} {name}=false")
    return DDPStrategy(
        split_graph,
        exact_threads,
        comm_hook_of(comm_hook),
        process_group_backend=process_group_backend,
        timeout=timedelta(seconds=timeout_seconds),
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
    )


def fsdp2(
    batch: Batch | None = None,
    *,
    process_group_backend: str | None = None,
    timeout_seconds: float = LONGEST_WAIT,
    reshard_after_forward: bool = True,
    param_dtype: str = "float32",
    reduce_dtype: str = "float32",
    reduce_each: bool = False,
    tensor_parallel: int = 1,
    save_parts: bool = False,
) -> Strategy:
    """Return the strategy that shards over all ranks; with a single rank, nothing is.

        >>> trainer = Trainer(devices=2, strategy=lockstep.FSDP2(reshard_after_forward=False))

    Args:
        batch: must be spread over the ranks with the same `tensor_parallel`, without exact sums.
        process_group_backend: nccl or gloo; None: nccl on GPUs, gloo elsewhere.
        timeout_seconds: longest wait for another rank.
        reshard_after_forward: release a block's gathered weights between forward and backward.
        param_dtype: type of a block's gathered weights and of its activations, float32 or
            bfloat16; shards and their updates stay float32.
        reduce_dtype: type in which gradients are added over ranks.
        reduce_each: scatter gradients in each micro-batch, instead of once a step.
        tensor_parallel: how many neighboring ranks split layers, by the model's `tensor_plan`.
        save_parts: each rank writes its shard of a checkpoint, all at the same time.

    Raises:
        UserError: a value is not one of its choices, or two exclude each other.
    """
    check_connection(process_group_backend, timeout_seconds)
    check_switch("reshard_after_forward", reshard_after_forward)
    check_choice("param_dtype", param_dtype, SHARD_DTYPES)
    check_choice("reduce_dtype", reduce_dtype, SHARD_DTYPES)
    check_switch("reduce_each", reduce_each)
    check_switch("save_parts", save_parts)
    world_size = Ranks.from_environment().world_size
    check_tensor_parallel(tensor_parallel, world_size, batch, save_parts=save_parts)
    if threads_of(batch) is not None:
        raise UserError(
            "strategy=fsdp2 adds gradients in rank order; set batch.exact_micro_size=null, or "
            "strategy=ddp"
        )
    if world_size == 1:
        return SingleDeviceStrategy()
    # Only here: it imports all of torch's DTensor.
    from lockstep.strategies.fsdp2 import build_fsdp2

    return build_fsdp2(
        world_size,
        process_group_backend=process_group_backend,
        timeout_seconds=timeout_seconds,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reduce_each=reduce_each,
        tensor_parallel=tensor_parallel,
        save_parts=save_parts,
    )


def threads_of(batch: Batch | None) -> int | None:
    """Return with how many threads each rank adds gradients in one order; None: in any order."""
    return batch.exact_threads if batch is not None and batch.is_exact else None


def check_connection(backend: str | None, seconds: float) -> None:
    """Raise a `UserError` unless these can be how ranks connect, and how long they wait."""
    check_choice("process_group_backend", backend, BACKENDS)
    check_number("timeout_seconds", seconds, above=0)


def check_tensor_parallel(
    parts: int, world_size: int, batch: Batch | None, *, save_parts: bool
) -> None:
    """Raise a `UserError` unless there are whole groups of `parts` ranks.

    Args:
        parts: how many ranks are a group.
        world_size: all ranks.
        batch: must count the same groups.
        save_parts: whether each rank saves its own shards.
    """
    name = "tensor_parallel"
    check_whole(name, parts, at_least=1)
    check(
        name,
        parts,
        world_size % parts == 0,
        f"does not divide {counted(world_size, 'rank')}; use a divisor",
    )
    if batch is not None and batch.is_spread:
        rule = f"does not fit batch.spread_over(..., tensor_parallel={batch.tensor_parallel})"
        check(name, parts, parts == batch.tensor_parallel, rule)
    rule = f"does not work with {name}={parts}; set one of them to its default"
    check("save_parts", save_parts, parts == 1 or not save_parts, rule)
