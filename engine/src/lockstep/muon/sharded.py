"""Muon over shards: each rank has some rows of every matrix, of its gradient, and of its momentum.

All but the orthogonalization works on single elements, so shards need no exchange for it. To be
orthogonalized, a matrix's shards meet on one rank, in the type of the products, and the shards of
the result return: updates are exactly those of a single device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.muon import orthogonalization
from lockstep.muon.exchange import MatrixExchange
from lockstep.muon.orthogonalization import flops_of, orthogonalized
from lockstep.muon.placement import (
    Rates,
    add_updates,
    gradients_of,
    nesterov_gradients,
)
from lockstep.patches.torch import compiled_for_each_shape


class ShardedMatrices:
    """For matrices that are `DTensor`s, sharded by rows over all ranks of their mesh.

    If tensor ranks split a matrix, what meets on a rank is its part. The ranks that have the parts
    of a matrix then exchange them, and each computes with the whole.

    Args:
        compiled: compute what is between two exchanges in one compiled function.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._directions_of = directions_of
        self._orthogonalized = orthogonalized
        self._add_updates = add_updates
        if compiled:
            self._directions_of = compiled_for_each_shape(directions_of)
            self._orthogonalized = compiled_for_each_shape(orthogonalized)
            self._add_updates = compiled_for_each_shape(add_updates)

    def keeps(self, matrix: Tensor) -> bool:
        """Return True: each rank keeps its shard."""
        return True

    def update(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
        rates_of: Callable[[torch.Size], Rates],
    ) -> None:
        """Update this rank's shards, a few matrices at a time; see `MatrixExchange`."""
        from lockstep.strategies.tensor_parallel import tensor_part  # imports all of DTensor

        sharded: Sequence[Any] = matrices
        parts = [tensor_part(matrix) for matrix in sharded]
        shapes = [
            matrix.shape if part is None else part.shape
            for matrix, part in zip(matrices, parts, strict=True)
        ]
        costs = [flops_of(matrix.shape) for matrix in matrices]
        exchange = MatrixExchange(shapes, costs, sharded[0].device_mesh.get_group(0))
        dtype = orthogonalization.product_type(sharded[0].device)
        rates_of = cache(rates_of)

        def send(numbers: list[int]) -> list[Tensor]:
            chosen = [matrices[number] for number in numbers]
            directions: dict[Tensor, Tensor] = {}
            for shape, weights in by_shapes(chosen):
                averages = shards_of([momenta[weight] for weight in weights])
                gradients = shards_of(gradients_of(weights))
                stacked = self._directions_of(gradients, averages, rates_of(shape), dtype)
                directions |= zip(weights, stacked, strict=True)
            return [directions[weight] for weight in chosen]

        def orthogonalize(number: int, matrix: Tensor) -> Tensor:
            part = parts[number]
            if part is None:
                return self._orthogonalized(matrix, dtype)
            whole = part.whole(matrix[0])
            return part.of(self._orthogonalized(whole[None], dtype)[0])

        for numbers, results in exchange.apply(send, orthogonalize):
            chosen = [matrices[number] for number in numbers]
            updates = dict(zip(chosen, results, strict=True))
            for shape, weights in by_shapes(chosen):
                stacked = torch.stack([updates[weight] for weight in weights])
                self._add_updates(shards_of(weights), stacked, rates_of(shape))

    def whole_momenta(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
    ) -> Mapping[Tensor, Tensor]:
        """Return `momenta`, which the strategy gathers or saves in parts, like all other shards."""
        return momenta


def by_shapes(matrices: Sequence[Tensor]) -> Iterator[tuple[torch.Size, list[Tensor]]]:
    """Yield each shape of whole matrices, and those with that shape and equal shards."""
    shapes = {
        matrix: (matrix.shape, shard.shape)
        for matrix, shard in zip(matrices, shards_of(matrices), strict=True)
    }
    for both in dict.fromkeys(shapes.values()):
        yield both[0], [matrix for matrix in matrices if shapes[matrix] == both]


def directions_of(
    gradients: list[Tensor], averages: list[Tensor], rates: Rates, dtype: torch.dtype
) -> Tensor:
    """Return what must be orthogonalized, (N, rows, columns), in the type of the products."""
    return nesterov_gradients(gradients, averages, rates).to(dtype)


def shards_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shards of `DTensor`s, in the same memory."""
    sharded: Sequence[Any] = tensors
    return [tensor.to_local() for tensor in sharded]
