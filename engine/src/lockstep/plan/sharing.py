"""How ranks share a model or its updates: what each stores, and what ranks gather and scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.muon.orthogonalization import flops_of
from lockstep.muon.owned import SHORT, owners_of

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Sharing:
    """How the model is sharded: each block is gathered and scattered as a unit, then the rest."""

    blocks: int
    block: int  # elements of one
    rest: int  # elements outside of all blocks, which stay float32
    reshards: bool  # blocks are released after forward and gathered again for backward
    gathered_size: int  # bytes per element of a block, in transit and while it computes
    reduced_size: int  # bytes per element of a gradient in transit
    adds_whole: bool = True  # gradients before a step's last micro-batch are added up unsharded
    matrices: int = 0  # that Muon orthogonalizes, each whole on one rank
    matrix_elements: int = 0  # of all these

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        matrices: Sequence[Tensor],
        settings: Mapping[str, Any],
    ) -> Sharing:
        """Return how `lockstep.FSDP2` shards a model.

        Args:
            model: whose states are sharded.
            blocks: its units.
            matrices: that Muon updates.
            settings: arguments of `lockstep.FSDP2`.
        """
        sizes = [_elements(block) for block in blocks]
        return cls(
            blocks=len(sizes),
            block=max(sizes, default=0),
            rest=_elements(model) - sum(sizes),
            reshards=settings.get("reshard_after_forward", True),
            gathered_size=BYTES[settings.get("param_dtype", "float32")],
            reduced_size=BYTES[settings.get("reduce_dtype", "float32")],
            adds_whole=not settings.get("reduce_each", False),
            matrices=len(matrices),
            matrix_elements=sum(matrix.numel() for matrix in matrices),
        )

    @property
    def gathered(self) -> int:
        """Bytes of weights that a rank has gathered at once, and of gradients that it scatters.

        torch gathers the next block while one computes, and scatters the gradients of one. The rest
        of the model, whose tied embedding is both first and last, stays gathered throughout.
        """
        gathered_blocks = min(2, self.blocks) if self.reshards else self.blocks
        blocks = gathered_blocks * self.gathered_size + min(1, self.blocks) * self.reduced_size
        return blocks * self.block + 4 * self.rest


@dataclass(frozen=True)
class Ownership:
    """How ranks under DDP share Muon's matrices: each orthogonalizes its own."""

    shapes: tuple[tuple[int, ...], ...]
    size: int  # bytes per number of the momentum

    @classmethod
    def of(cls, matrices: Sequence[Tensor]) -> Ownership | None:
        """Return how ranks share the matrices; None if they are too small for that."""
        shared = [matrix for matrix in matrices if min(matrix.shape) > SHORT]
        if not shared:
            return None
        return cls(tuple(tuple(matrix.shape) for matrix in shared), shared[0].itemsize)

    @property
    def updates(self) -> int:
        """Bytes of all updates, which are sent in bfloat16."""
        return 2 * sum(map(math.prod, self.shapes))

    def largest_share(self, world_size: int) -> float:
        """Return the busiest rank's share of the products."""
        return max(self._sums(flops_of, world_size)) / sum(map(flops_of, self.shapes))

    def saved(self, world_size: int) -> int:
        """Return the bytes of momentum that a rank need not keep."""
        whole = sum(map(math.prod, self.shapes))
        return self.size * (whole - max(self._sums(math.prod, world_size)))

    def _sums(self, size: Callable[[tuple[int, ...]], int], world_size: int) -> list[int]:
        """Return the sum of the matrices' sizes on each rank."""
        sums = [0] * world_size
        for shape, owner in zip(self.shapes, owners_of(self.shapes, world_size), strict=True):
            sums[owner] += size(shape)
        return sums


def _elements(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
