"""Muon on shards: each rank has some rows of every matrix, of its gradient, and of its momentum.

All but the orthogonalization works on single elements, so shards need no exchange for it. To be
orthogonalized, a matrix's shards meet on one rank, which returns the shards of the result.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep_gpt.distributed.matrix_exchange import MatrixExchange
from lockstep_gpt.training import orthogonalization
from lockstep_gpt.training.matrix_placement import (
    Rates,
    add_updates,
    by_shape,
    gradients_of,
    nesterov_gradients,
)
from lockstep_gpt.training.orthogonalization import orthogonalized


class ShardedMatrices:
    """A `MatrixPlacement` for matrices that are `DTensor`s, sharded by rows.

    Args:
        group: the ranks that have the shards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

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
        dtype = orthogonalization.product_type(matrices[0].device)
        shapes = [matrix.shape for matrix in matrices]
        exchange = MatrixExchange(shapes, [*map(operations, shapes)], self._group)
        rates_of = cache(rates_of)

        def directions_of(numbers: list[int]) -> list[Tensor]:
            chosen = [matrices[number] for number in numbers]
            directions: dict[Tensor, Tensor] = {}
            for shape, weights in by_shape(chosen):
                averages = shards_of([momenta[weight] for weight in weights])
                gradients = shards_of(gradients_of(weights))
                stacked = nesterov_gradients(gradients, averages, rates_of(shape)).to(dtype)
                directions |= zip(weights, stacked, strict=True)
            return [directions[weight] for weight in chosen]

        rounds = exchange.apply(directions_of, partial(orthogonalized, dtype=dtype))
        for numbers, results in rounds:
            chosen = [matrices[number] for number in numbers]
            updates = dict(zip(chosen, results, strict=True))
            for shape, weights in by_shape(chosen):
                stacked = torch.stack([updates[weight] for weight in weights])
                add_updates(shards_of(weights), stacked, rates_of(shape))

    def whole_momenta(
        self,
        matrices: Sequence[Tensor],  # noqa: ARG002
        momenta: Mapping[Tensor, Tensor],
    ) -> Mapping[Tensor, Tensor]:
        """Return `momenta`, which the strategy gathers, or saves in parts, as all other shards."""
        return momenta


def shards_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shards of `DTensor`s, in the same memory."""
    sharded: Sequence[Any] = tensors
    return [tensor.to_local() for tensor in sharded]


def operations(shape: torch.Size) -> int:
    """Return how many operations an iteration of Newton-Schulz takes, for (rows, columns)."""
    few, many = sorted(shape)
    return 2 * few * few * (2 * many + few)
