"""FSDP2: each rank stores a shard of the weights, the gradients, and the optimizer state.

By default, its checkpoints are whole, as with any other strategy. If no rank can hold the whole,
or to save faster, each rank writes its own part, and the reader joins the parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lockstep.errors import UserError
from lockstep.patches.lightning import skip_teardown, synchronizes_batchnorm
from lockstep.patches.torch import limit_waits
from lockstep.ranks.mean_of_counts import MeanOfCounts
from lockstep.settings import check
from lockstep.strategies.checkpoint_parts import write_part
from lockstep.strategies.optimizers import PreparesOptimizers
from lockstep.strategies.rank_states import (
    is_of_rank,
    state_of_rank,
    with_own_shards,
)
from lockstep.strategies.sharded_states import gathered, share_of
from lockstep.strategies.tensor_parallel import (
    split_by_plan,
    take_weights_one_by_one,
    tensor_part,
)

PRECISIONS = ("32-true", "bf16-mixed")  # in which shards are updated as whole weights are


def build_fsdp2(
    world_size: int,
    *,
    process_group_backend: str | None,
    timeout_seconds: float,
    reshard_after_forward: bool,
    param_dtype: str,
    reduce_dtype: str,
    reduce_each: bool,
    tensor_parallel: int,
    save_parts: bool,
) -> ShardedStrategy:
    """Return the strategy that shards over `world_size` ranks; see `strategies.fsdp2`."""
    return ShardedStrategy(
        MixedPrecisionPolicy(
            param_dtype=getattr(torch, param_dtype),
            reduce_dtype=getattr(torch, reduce_dtype),
            # Otherwise, activations that autocast made bfloat16 would become float32 again.
            cast_forward_inputs=param_dtype != "float32",
        ),
        reshard_after_forward,
        save_parts,
        reduce_each,
        tensor_parallel,
        data_parallel_size=world_size // tensor_parallel,
        tensor_parallel_size=tensor_parallel,
        save_distributed_checkpoint=False,
        process_group_backend=process_group_backend,
        timeout=timedelta(seconds=timeout_seconds),
    )


class ShardedStrategy(PreparesOptimizers, MeanOfCounts, ModelParallelStrategy):
    """Lightning's strategy, which saves and loads states in the form that a single device uses.

    Lightning's own version would number the optimizer state in the order of the model, not of the
    optimizer's groups, and would read files without our checks.

    Args:
        policy: the types in which blocks gather weights and add gradients.
        reshard_after_forward: release gathered weights between forward and backward.
        save_parts: each rank writes its shard of a checkpoint.
        reduce_each: scatter gradients in each micro-batch.
        tensor_parallel: how many neighboring ranks split the layers.
        timeout: longest wait for another rank.
        arguments: passed on to Lightning's `ModelParallelStrategy`.
    """

    lightning_restore_optimizer = True
    has_replicas = False

    def __init__(
        self,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
        save_parts: bool,
        reduce_each: bool,
        tensor_parallel: int,
        timeout: timedelta,
        **arguments: Any,
    ) -> None:
        super().__init__(timeout=timeout, **arguments)
        self._longest_wait = timeout
        self._policy = policy
        self._reshard = reshard_after_forward
        self._save_parts = save_parts
        self._reduce_each = reduce_each
        self._tensor_parallel = tensor_parallel

    @property
    def saves_parts(self) -> bool:
        """Whether each rank writes its shard of a checkpoint."""
        return self._save_parts

    @property
    def tensor_parallel(self) -> int:
        """How many neighboring ranks split the layers."""
        return self._tensor_parallel

    def setup_environment(self) -> None:
        """Connect; all groups have the timeout that is set, those of the mesh too.

        Lightning tells it only to that of all ranks; torch gives the others its own default.
        """
        super().setup_environment()
        for group in self.device_mesh.get_all_groups():
            limit_waits(group, self._longest_wait)

    def setup(self, trainer: Trainer) -> None:
        """Refuse a module of which nothing is sharded: each rank would train all by itself.

        Raises:
            UserError: that, or a setting of the Trainer's with which shards don't work.
        """
        assert self.lightning_module is not None
        module = self.lightning_module
        synchronized = synchronizes_batchnorm(trainer)
        rule = "does not work with strategy=fsdp2; set strategy=ddp"
        check("trainer.sync_batchnorm", synchronized, not synchronized, rule)
        rule = "does not work with strategy=fsdp2; set 32-true or bf16-mixed, or strategy=ddp"
        check("precision", trainer.precision, trainer.precision in PRECISIONS, rule)
        is_half = self._policy.param_dtype == torch.bfloat16
        if is_half and trainer.precision != "bf16-mixed":
            raise UserError(
                f"strategy.param_dtype=bfloat16 with precision={trainer.precision}; "
                "set precision=bf16-mixed, or param_dtype=float32"
            )
        if not any(isinstance(weight, DTensor) for weight in module.parameters()):
            raise UserError(
                f"strategy=fsdp2 shards what `configure_model` of {type(module).__name__} gives to "
                "`lockstep.strategies.placing.place`, which is nothing; write "
                "`place(self.net, self.trainer.strategy)` there, or set strategy=ddp"
            )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let no kernel of theirs take split and whole weights at once: these are on two meshes."""
        super().setup_optimizers(trainer)
        if self._tensor_parallel > 1:
            for optimizer in self.optimizers:
                take_weights_one_by_one(optimizer)
                optimizer.register_load_state_dict_post_hook(take_weights_one_by_one)

    def place_model(self, model: nn.Module, compiled: bool) -> None:
        """Shard each of `model.blocks`, then the rest; a model without blocks is a single unit.

        Under tensor parallelism, the model's plan first splits its layers.
        If `compiled`, each block is compiled by itself, so weights are gathered between graphs,
        and so is the loss, if the model has a method for it.
        """
        mesh = self.device_mesh["data_parallel"]
        if self._tensor_parallel > 1:
            split_by_plan(model, self.device_mesh["tensor_parallel"])
        if compiled and hasattr(model, "loss"):
            user_model: Any = model
            user_model.loss = torch.compile(user_model.loss, dynamic=False)
        for block in getattr(model, "blocks", ()):
            if compiled:  # only its forward: hooks gather its weights before and after
                block.forward = torch.compile(block.forward, dynamic=False)
            fully_shard(
                block, mesh=mesh, mp_policy=self._policy, reshard_after_forward=self._reshard
            )
        rest = MixedPrecisionPolicy(reduce_dtype=self._policy.reduce_dtype)
        # Gathered again for backward; otherwise, it would also stay whole after a validation.
        fully_shard(model, mesh=mesh, mp_policy=rest, reshard_after_forward=True)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not scatter gradients before a step's last micro-batch, unless `reduce_each`."""
        assert self.lightning_module is not None
        shared = [part for part in self.lightning_module.modules() if isinstance(part, FSDPModule)]
        for part in shared:
            part.set_requires_gradient_sync(self._reduce_each, recurse=False)
        yield
        for part in shared:
            part.set_requires_gradient_sync(True, recurse=False)

    def on_exception(self, exception: BaseException) -> None:
        """Wait for nothing that may need a lost peer."""
        assert self.lightning_module is not None
        skip_teardown(self.lightning_module.trainer)

    def whole_model(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module | None:
        """Return a whole copy of `model` in host memory on rank 0; every rank must call this."""
        weights = gathered(dict(model.state_dict()))
        if self.global_rank:
            return None
        copy = build()
        copy.load_state_dict(weights)
        return copy

    def gradient_norm(self, weights: list[nn.Parameter]) -> Tensor:
        """Return the norm of the weights' gradients; every rank must call this.

        Tensor ranks have other parts of a split weight, but the same gradient of any other.
        """
        grads: dict[bool, list[Tensor]] = {True: [], False: []}  # split by tensor ranks or not
        for weight in cast(list[Any], weights):
            if weight.grad is not None:
                grads[tensor_part(weight) is not None].append(weight.grad.to_local())
        square = torch.zeros((), device=self.root_device)
        for is_split, shards in grads.items():
            if shards:
                square = square + get_total_norm(shards).square()
            if shards and is_split:
                dist.all_reduce(square, group=self.device_mesh.get_group("tensor_parallel"))
        dist.all_reduce(square, group=self.device_mesh.get_group("data_parallel"))
        return square.sqrt()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, whole on rank 0 or as shards; every rank must call this."""
        assert self.lightning_module is not None
        states: dict[str, Any] = self.lightning_module.state_dict()
        return states if self._save_parts else cast(dict[str, Any], gathered(states))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer state, whole on rank 0 or as shards; every rank must call this."""
        states = ParallelStrategy.optimizer_state(self, optimizer)
        if self._save_parts:
            return states
        return {**states, "state": gathered(states["state"])}

    @contextlib.contextmanager
    def states_in_shards(self) -> Iterator[None]:
        """Return states as shards in this context, also without `save_parts`."""
        save_parts = self._save_parts
        self._save_parts = True
        yield
        self._save_parts = save_parts

    def state_of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank keeps of a checkpoint with shards; `load_checkpoint` accepts it."""
        return state_of_rank(checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; every rank must call this.

        The parts are written first, the checkpoint that names them last: until then, there is none.
        """
        path = Path(filepath)
        if self._save_parts:
            checkpoint, storage_options = write_part(
                checkpoint, path, self.checkpoint_io, self.root_device
            )
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint on every rank, which then reads only its own shards."""
        reader: Any = self.checkpoint_io
        checkpoint = reader.load_checkpoint(checkpoint_path, weights_only=weights_only, whole=False)
        if is_of_rank(checkpoint):
            checkpoint = with_own_shards(checkpoint)
        return cast(dict[str, Any], checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shard of every saved weight."""
        assert self.lightning_module is not None
        places = self.lightning_module.state_dict()
        shares = {
            name: share_of(weight, places[name]) if name in places else weight
            for name, weight in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(shares, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shard of the optimizer state of every weight."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            places = {
                number: parameter
                for theirs, ours in zip(saved["param_groups"], optimizer.param_groups, strict=True)
                for number, parameter in zip(theirs["params"], ours["params"], strict=True)
            }
            shares = {
                number: {name: share_of(value, places[number]) for name, value in state.items()}
                for number, state in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": shares})
