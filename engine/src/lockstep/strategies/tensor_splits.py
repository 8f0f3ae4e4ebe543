"""Tensor parallelism: how the ranks of a group split each weight, and how its parts are joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that split a model's weights and compute on the same samples."""

    rank: int  # of this process in the group
    size: int
    group: ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """Return this process's group in a mesh of one dimension."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; every rank of the group must call this."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def each(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; every rank of the group must call this."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor, group=self.group)
        return tensors


@dataclass(frozen=True)
class Split:
    """A weight's rows or columns, of which each rank has equally many neighbors.

    The rows of a fused layer are `groups` of rows that are split by themselves: with queries, keys,
    and values in one matrix, (3 C, C), each rank has all three of its heads.
    """

    dim: int  # 0: outputs, or rows of an embedding; 1: inputs
    groups: int = 1

    def part(self, whole: Tensor, ranks: TensorRanks) -> Tensor:
        """Return this rank's part of a weight, in its own memory."""
        part = self._grouped(whole).chunk(ranks.size, dim=self.dim + 1)[ranks.rank]
        return part.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def whole(self, part: Tensor, ranks: TensorRanks) -> Tensor:
        """Return the weight of all ranks' parts; every rank of the group must call this."""
        parts = ranks.each(part.contiguous())
        grouped = torch.cat([self._grouped(part) for part in parts], dim=self.dim + 1)
        return grouped.flatten(self.dim, self.dim + 1)

    def _grouped(self, weight: Tensor) -> Tensor:
        """Return `weight` with its groups as a dimension of their own, at `dim`."""
        shape = weight.shape
        return weight.view(*shape[: self.dim], self.groups, -1, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class TensorPart:
    """What this rank has of one weight."""

    split: Split
    ranks: TensorRanks

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that has the weight's shape."""
        return self.split.part(whole, self.ranks)

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor of all ranks' parts; every rank of the group must call this."""
        return self.split.whole(part, self.ranks)

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """Return the weight's shape, of which `shape` is that of a part."""
        sizes = [*shape]
        sizes[self.split.dim] *= self.ranks.size
        return torch.Size(sizes)


# The last part of a layer's name -> how its weight is split.
SPLITS = {
    "token_embedding": Split(0),
    "ngram_embedding": Split(0),
    "output": Split(0),
    "qkv": Split(0, groups=3),
    "query": Split(0),
    "key": Split(0),
    "value": Split(0),
    "expansion": Split(0),
    "projection": Split(1),
}


def split_of(name: str) -> Split | None:
    """Return how the parameter `name` is split, or None if each rank has all of it.

    A layer whose inputs are split has a whole bias: it is added to the sum of the ranks' outputs.
    """
    *path, kind = name.split(".")
    split = SPLITS.get(path[-1]) if path else None
    if split is not None and kind == "bias" and split.dim == 1:
        return None
    return split
