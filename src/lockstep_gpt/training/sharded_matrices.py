"""Muon over shards: each rank has some rows of every matrix, of its gradient, and of its momentum.

All but the orthogonalization works on single elements, so shards need no exchange for it. To be
orthogonalized, a matrix's shards meet on one rank, in the type of the products, and the shards of
the result return: updates are exactly those of a single device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep_gpt.distributed.matrix_exchange import MatrixExchange
from lockstep_gpt.torch_patches import compiled_for_each_shape
from lockstep_gpt.training import orthogonalization
from lockstep_gpt.training.matrix_placement import (
    Rates,
    add_updates,
    by_shape,
    gradients_of,
    nesterov_gradients,
)
from lockstep_gpt.training.orthogonalization import flops_of, orthogonalized


class ShardedMatrices:
    """For matrices that are `DTensor`s, sharded by rows over all ranks of their mesh.

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

    def keeps(self, matrix: Tensor) -> bool:  # noqa: ARG002
        """Return True: each rank keeps its shard."""
        return True

    def update(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
        rates_of: Callable[[torch.Size], Rates],
    ) -> None:
        """Update this rank's shards, a few matrices at a time; see `MatrixExchange`."""
        sharded: Any = matrices[0]
        shapes = [matrix.shape for matrix in matrices]
        costs = [flops_of(shape) for shape in shapes]
        exchange = MatrixExchange(shapes, costs, sharded.device_mesh.get_group())
        dtype = orthogonalization.product_type(sharded.device)
        rates_of = cache(rates_of)

        def send(numbers: list[int]) -> list[Tensor]:
            chosen = [matrices[number] for number in numbers]
            directions: dict[Tensor, Tensor] = {}
            for shape, weights in by_shape(chosen):
                averages = shards_of([momenta[weight] for weight in weights])
                gradients = shards_of(gradients_of(weights))
                stacked = self._directions_of(gradients, averages, rates_of(shape), dtype)
                directions |= zip(weights, stacked, strict=True)
            return [directions[weight] for weight in chosen]

        def orthogonalize(matrix: Tensor) -> Tensor:
            return self._orthogonalized(matrix, dtype)

        for numbers, results in exchange.apply(send, orthogonalize):
            chosen = [matrices[number] for number in numbers]
            updates = dict(zip(chosen, results, strict=True))
            for shape, weights in by_shape(chosen):
                stacked = torch.stack([updates[weight] for weight in weights])
                self._add_updates(shards_of(weights), stacked, rates_of(shape))

    def whole_momenta(
        self,
        matrices: Sequence[Tensor],  # noqa: ARG002
        momenta: Mapping[Tensor, Tensor],
    ) -> Mapping[Tensor, Tensor]:
        """Return `momenta`, which the strategy gathers or saves in parts, like all other shards."""
        return momenta


def directions_of(
    gradients: list[Tensor], averages: list[Tensor], rates: Rates, dtype: torch.dtype
) -> Tensor:
    """Return what must be orthogonalized, (N, rows, columns), in the type of the products."""
    return nesterov_gradients(gradients, averages, rates).to(dtype)


def shards_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shards of `DTensor`s, in the same memory."""
    sharded: Sequence[Any] = tensors
    return [tensor.to_local() for tensor in sharded]
