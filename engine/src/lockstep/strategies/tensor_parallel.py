"""Tensor parallelism: a group of ranks has the same samples, and splits layers by a model's plan.

Splitting weights twice, over groups by FSDP2 and in a group by the plan, gives a mesh of two
dimensions: data, then tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from lockstep.settings import check

SETTING = "strategy.tensor_parallel"


def split_by_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a whole model over the ranks of a group, in place.

    What its plan leaves out stays whole, and each rank of the group computes it.

    Args:
        model: its method `tensor_plan` takes the number of ranks, and returns a plan as torch's
            `parallelize_module` takes it: name of a layer -> how its weights are split.
        mesh: the group.

    Raises:
        UserError: the model has no such method, or its plan doesn't split weights evenly.
    """
    ranks = mesh.size()
    kind = type(model).__name__
    plan_for: Any = getattr(model, "tensor_plan", None)
    rule = f"splits layers by a plan, and {kind} has no method tensor_plan; add it, or set 1"
    check(SETTING, ranks, plan_for is not None, rule)
    parallelize_module(model, mesh, plan_for(ranks))
    parts = {name: part for name, part in model.named_parameters() if isinstance(part, DTensor)}
    rule = f"splits no weight by the plan of {kind}.tensor_plan; name its layers, or set 1"
    check(SETTING, ranks, bool(parts), rule)
    for name, part in parts.items():
        for size in (part.shape[each.dim] for each in part.placements if isinstance(each, Shard)):
            check(SETTING, ranks, size % ranks == 0, f"does not divide the {size} of {name}; set 1")


@dataclass(frozen=True)
class TensorPart:
    """What a rank of a tensor group has of a weight, all data shards together."""

    mesh: DeviceMesh  # data, tensor
    dim: int  # of the weight, which the group splits
    shape: tuple[int, ...]  # of the part

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that has the weight's shape."""
        return whole.chunk(self.mesh.size(1), self.dim)[self.mesh.get_local_rank(1)]

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor of all ranks' parts; every rank of the group must call this."""
        return DTensor.from_local(part, self.mesh, [Replicate(), Shard(self.dim)]).full_tensor()


def tensor_part(weight: DTensor) -> TensorPart | None:
    """Return which part of a placed weight this rank has; None: all, apart from data shards."""
    mesh, last = weight.device_mesh, weight.placements[-1]
    if mesh.ndim == 1 or not isinstance(last, Shard):
        return None
    shape = [*weight.shape]
    shape[last.dim] //= mesh.size(1)
    return TensorPart(mesh, last.dim, tuple(shape))


def whole_of(tensor: DTensor) -> Tensor:
    """Return the whole of a shard; every rank must call this.

    First over data ranks, then over tensor ranks: torch warns of both at once.
    """
    part = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return part.full_tensor()


def take_weights_one_by_one(optimizer: Optimizer) -> None:
    """Let torch's optimizer update each weight by itself, unless a fused kernel does."""
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = False
