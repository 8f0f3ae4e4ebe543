"""FSDP2: every rank holds a share of the weights, the gradients and the optimizer's state.

What leaves it is whole again: checkpoints are those of any other strategy. Where no rank can hold
the whole, or to save sooner, each rank writes a part of its own, and who reads them joins them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lockstep_gpt.model.gpt import GPT, build_gpt
from lockstep_gpt.training.checkpoint import write_checkpoint


def fsdp2(
    *,
    accelerator: str,
    world_size: int,
    process_group_backend: str | None,
    timeout_seconds: float,
    reshard_after_forward: bool,
    param_dtype: str,
    reduce_dtype: str,
    save_parts: bool,
    reduce_each: bool = False,  # which runs of earlier versions do not say
) -> Strategy:
    """Return the strategy that shards over all ranks; one rank has nothing to share.

    Args:
        accelerator: cpu or cuda.
        world_size: ranks in all.
        process_group_backend: nccl or gloo; None: nccl on GPUs, gloo elsewhere.
        timeout_seconds: longest wait for another rank.
        reshard_after_forward: give up a block's gathered weights between forward and backward.
        param_dtype: of a block's gathered weights and of what passes through it, float32 or
            bfloat16; shares and their updates stay float32.
        reduce_dtype: in which gradients are added over ranks.
        save_parts: each rank writes its share of a checkpoint, all at the same time.
        reduce_each: scatter gradients in each micro-batch, instead of once a step.
    """
    if world_size == 1:
        device = torch.device("cuda", 0) if accelerator == "cuda" else torch.device("cpu")
        return SingleDeviceStrategy(device)
    return Sharded(
        MixedPrecisionPolicy(
            param_dtype=getattr(torch, param_dtype),
            reduce_dtype=getattr(torch, reduce_dtype),
        ),
        reshard_after_forward,
        save_parts,
        reduce_each,
        data_parallel_size=world_size,
        tensor_parallel_size=1,
        save_distributed_checkpoint=False,
        process_group_backend=process_group_backend,
        timeout=timedelta(seconds=timeout_seconds),
    )


class Sharded(ModelParallelStrategy):
    """Lightning's strategy, with states that go in and out in the form that one device gives them.

    Lightning's own would number the optimizer's state by the order of the model, not of the
    optimizer's groups, and would read files past our checks.

    Args:
        policy: in which types blocks gather weights and add gradients.
        reshard_after_forward: give up gathered weights between forward and backward.
        save_parts: each rank writes its share of a checkpoint.
        reduce_each: scatter gradients in each micro-batch.
        arguments: passed on to Lightning's `ModelParallelStrategy`.
    """

    lightning_restore_optimizer = True

    def __init__(
        self,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
        save_parts: bool,
        reduce_each: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._policy = policy
        self._reshard = reshard_after_forward
        self._save_parts = save_parts
        self._reduce_each = reduce_each

    def shard(self, model: nn.Module, compiled: bool = False) -> None:
        """Shard each of `model.blocks`, then what is left; a model without is one piece.

        What is `compiled` is each block by itself, so that weights are gathered between graphs.
        """
        mesh = self.device_mesh["data_parallel"]
        for block in getattr(model, "blocks", ()):
            if compiled:  # its forward alone: what gathers its weights runs before and after
                block.forward = torch.compile(block.forward, dynamic=False)
            fully_shard(
                block, mesh=mesh, mp_policy=self._policy, reshard_after_forward=self._reshard
            )
        rest = MixedPrecisionPolicy(reduce_dtype=self._policy.reduce_dtype)
        # Gathered again for backward: else it would stay whole after a validation, too.
        fully_shard(model, mesh=mesh, mp_policy=rest, reshard_after_forward=True)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up whole gradients until the last micro-batch of a step, which scatters their sum."""
        assert self.lightning_module is not None
        shared = cast(FSDPModule, self.lightning_module.model)
        shared.set_requires_gradient_sync(self._reduce_each)
        yield
        shared.set_requires_gradient_sync(True)

    def whole_model(self, model: GPT) -> GPT | None:
        """Return a whole copy of `model` in host memory on rank zero; every rank must call this."""
        weights = gathered(model.state_dict())
        if self.global_rank:
            return None
        copy = build_gpt(model.config, model.vocab_size)
        copy.load_state_dict(weights)
        return copy

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, whole on rank zero or as shares; every rank must call this."""
        assert self.lightning_module is not None
        states: dict[str, Any] = self.lightning_module.state_dict()
        return states if self._save_parts else dict(gathered(states))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return its state, whole on rank zero or as shares; every rank must call this."""
        states = ParallelStrategy.optimizer_state(self, optimizer)
        return states if self._save_parts else dict(gathered(states))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; every rank must call this.

        Parts come first and the checkpoint, which names them, last: before it stands there is none.

        Raises:
            RunError: on the ranks whose file cannot be written; the others lose them as peers.
        """
        path = Path(filepath)
        if self._save_parts:
            names = [part_path(path, rank, self.world_size) for rank in range(self.world_size)]
            own = names[self.global_rank]
            digest = bytes.fromhex(write_checkpoint(shares_in(checkpoint), own, alone=False))
            mine = torch.tensor([*digest], dtype=torch.uint8, device=self.root_device)
            digests = [torch.empty_like(mine) for _ in names]
            dist.all_gather(digests, mine)
            storage_options = {
                part.name: bytes(each.tolist()).hex()
                for part, each in zip(names, digests, strict=True)
            }
            checkpoint = {**without_shares(checkpoint), "parts": [*storage_options]}
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a whole checkpoint into the host's memory, on every rank."""
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's share of every saved weight."""
        assert self.lightning_module is not None
        places = self.lightning_module.state_dict()
        shares = {
            name: share_of(weight, places[name]) if name in places else weight
            for name, weight in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(shares, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's share of what the optimizer knows of every weight."""
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


def gathered(states: Any) -> Any:
    """Make every share in nested containers whole, in host memory of rank zero alone.

    Every rank must call this; others than rank zero keep their shares.
    """
    if isinstance(states, dict):
        return {name: gathered(each) for name, each in states.items()}
    if isinstance(states, list):
        return [gathered(each) for each in states]
    if not isinstance(states, DTensor):
        return states
    whole = states.full_tensor()
    return whole.cpu() if states.device_mesh.get_rank() == 0 else states


def share_of(whole: Any, place: Tensor) -> Any:
    """Return this rank's share of `whole`, a tensor that all ranks hold, as `place` has its own.

    What has another shape than `place`, a count of steps for one, stays whole.
    """
    if not isinstance(place, DTensor) or getattr(whole, "shape", None) != place.shape:
        return whole
    # Without a source rank nothing is sent: each cuts its share from what it has.
    return distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None)


def part_path(path: Path, rank: int, world_size: int) -> Path:
    """Return where `rank` writes its part of the checkpoint `path`."""
    return path.with_name(f"{path.stem}.{rank:05d}-of-{world_size:05d}.part")


def shares_in(states: Any) -> dict[Any, Any]:
    """Return the shares in nested containers, in host memory, by their keys and indices."""
    found: dict[Any, Any] = {}
    for key, each in _items(states):
        if isinstance(each, DTensor):
            # A copy: a view's storage, which is what would be saved, may be of a whole block.
            found[key] = each.to_local().detach().cpu().clone()
        elif inner := shares_in(each):
            found[key] = inner
    return found


def without_shares(states: Any) -> Any:
    """Return nested containers with None in the place of each share."""
    if isinstance(states, dict):
        return {name: without_shares(each) for name, each in states.items()}
    if isinstance(states, list):
        return [without_shares(each) for each in states]
    return None if isinstance(states, DTensor) else states


def _items(states: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(states, dict):
        return states.items()
    return enumerate(states) if isinstance(states, list) else ()


def join_parts(content: dict[str, Any], path: Path) -> None:
    """Put what the ranks have written beside the checkpoint `path` into its `content`, whole.

    Shares are cut along the first dimension, in the order of ranks.
    """
    names = content.pop("parts")
    parts = [torch.load(path.with_name(name), weights_only=True, mmap=True) for name in names]
    _fill(content, parts)


def _fill(whole: Any, parts: list[dict[Any, Any]]) -> None:
    for key, share in parts[0].items():
        shares = [part[key] for part in parts]
        if isinstance(share, Tensor):
            whole[key] = torch.cat(shares)
        else:
            _fill(whole[key], shares)
