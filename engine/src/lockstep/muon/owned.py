"""Muon over replicas of a model: each matrix has one owner, which keeps its momentum.

Ranks orthogonalize the matrices that they own, and send the updates to all others, in the type of
the products: updates are exactly those of a single device. Momentum takes 1 / W of the memory.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.muon import orthogonalization
from lockstep.muon.orthogonalization import flops_of
from lockstep.muon.placement import (
    Rates,
    ReplicatedMatrices,
    add_updates,
    by_shape,
    gradients_of,
    updates_of,
)
from lockstep.patches.torch import compiled_for_each_shape
from lockstep.ranks.gathering import Gathering, gather_stacks
from lockstep.ranks.ranks import Ranks

Shape = tuple[int, ...]
# Products of matrices this short take less time than sending the result. And a CPU chooses their
# kernel by the size of the whole stack, so a matrix's bits would depend on the others of its rank.
SHORT = 16
# Momenta that travel at once to be saved: together, in a bounded amount of memory.
IN_FLIGHT = 8


class OwnedMatrices:
    """Each matrix belongs to one rank; all ranks have all weights and gradients.

    Matrices with a side of up to 16 belong to all ranks.

    Args:
        matrices: all that Muon updates, in the same order on all ranks.
        compiled: compute updates of one shape in one compiled function, and add them in another.
        one_by_one: orthogonalize each matrix by itself, not in a stack.
    """

    def __init__(
        self, matrices: Sequence[Tensor], compiled: bool = False, one_by_one: bool = False
    ) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        ranks = Ranks.from_environment()
        self._is_first = ranks.local_rank == 0
        self._is_one_machine = ranks.num_nodes == 1
        self._one_by_one = one_by_one
        self._updates_of = updates_of
        self._add_updates = add_updates
        if compiled:
            self._updates_of = compiled_for_each_shape(updates_of)
            self._add_updates = compiled_for_each_shape(add_updates)
        self._everywhere = ReplicatedMatrices(compiled, one_by_one)
        long = [matrix for matrix in matrices if min(matrix.shape) > SHORT]
        owners = owners_of(tuple(matrix.shape for matrix in long), self._world_size)
        self._owners = dict(zip(long, owners, strict=True))

    def keeps(self, matrix: Tensor) -> bool:
        """Return whether `matrix` belongs to this rank."""
        return self._owners.get(matrix, self._rank) == self._rank

    def update(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
        rates_of: Callable[[torch.Size], Rates],
    ) -> None:
        """Update all matrices; those of one shape travel while those of the next are computed."""
        short = [matrix for matrix in matrices if matrix not in self._owners]
        self._everywhere.update(short, momenta, rates_of)
        pending: tuple[Gathering, list[Tensor], Rates] | None = None
        for shape, weights in by_shape([matrix for matrix in matrices if matrix in self._owners]):
            rates = rates_of(shape)
            weights.sort(key=self._owners.__getitem__)  # the order in which updates arrive
            gathering = self._send_updates(weights, momenta, rates)
            if pending is not None:
                self._add(*pending)
            pending = gathering, weights, rates
        if pending is not None:
            self._add(*pending)

    def _send_updates(
        self, weights: list[Tensor], momenta: Mapping[Tensor, Tensor], rates: Rates
    ) -> Gathering:
        dtype = orthogonalization.product_type(weights[0].device)
        owned = [weight for weight in weights if self.keeps(weight)]
        if owned:
            averages = [momenta[weight] for weight in owned]
            updates = self._updates_of(
                gradients_of(owned), averages, rates, dtype, self._one_by_one
            )
        else:
            updates = weights[0].new_empty(0, *weights[0].shape, dtype=dtype)
        owners = [self._owners[weight] for weight in weights]
        return gather_stacks(updates, [owners.count(rank) for rank in range(self._world_size)])

    def _add(self, gathering: Gathering, weights: list[Tensor], rates: Rates) -> None:
        self._add_updates(weights, gathering.wait(), rates)

    def whole_momenta(
        self, matrices: Sequence[Tensor], momenta: Mapping[Tensor, Tensor]
    ) -> Mapping[Tensor, Tensor]:
        """Return the momentum of all `matrices`, in host memory, on the first rank of a machine."""
        whole = dict(momenta)
        arriving: deque[tuple[Tensor, Tensor, Any]] = deque()

        def receive() -> None:
            matrix, momentum, work = arriving.popleft()
            work.wait()
            if self._is_first and not self.keeps(matrix):
                whole[matrix] = momentum.cpu()

        for matrix in matrices:
            owner = self._owners.get(matrix)
            if owner is None or (owner == 0 and self._is_one_machine):
                continue
            momentum = momenta[matrix] if owner == self._rank else torch.empty_like(matrix)
            arriving.append((matrix, momentum, dist.broadcast(momentum, src=owner, async_op=True)))
            if len(arriving) == IN_FLIGHT:
                receive()
        while arriving:
            receive()
        return whole


@cache
def owners_of(shapes: tuple[Shape, ...], world_size: int) -> tuple[int, ...]:
    """Return the rank that owns each matrix, so that ranks multiply about equally much.

    Each rank owns equally many matrices of a shape. Those that remain, fewer than ranks, go to the
    ranks with the least to multiply so far, the most expensive shapes first.
    """
    owners = [0] * len(shapes)
    loads = [0] * world_size
    for shape in sorted(dict.fromkeys(shapes), key=flops_of, reverse=True):
        places = [place for place, other in enumerate(shapes) if other == shape]
        even = len(places) - len(places) % world_size
        ranks = [number % world_size for number in range(even)]
        ranks += sorted(range(world_size), key=loads.__getitem__)[: len(places) - even]
        for place, rank in zip(places, ranks, strict=True):
            owners[place] = rank
            loads[rank] += flops_of(shape)
    return tuple(owners)
