"""Whole matrices from shards of rows: each meets on one rank, and its result returns in shards.

A round has up to one matrix per rank, its owner. So a rank never has more than its shards, the one
matrix that it works on, and what is in transit. While owners compute, the next round's shards and
the last round's results travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def plan_rounds(costs: Sequence[float], world_size: int) -> list[dict[int, int]]:
    """Return the rounds: each round's matrices, by the rank that owns them.

    The ranks wait for each other in each round, so its matrices should cost about the same: a round
    has the next most expensive ones. The most expensive goes to the rank with the least to do.

    Args:
        costs: of each matrix, such as its operations.
        world_size: W.
    """
    order = sorted(range(len(costs)), key=lambda matrix: -costs[matrix])
    loads = [0.0] * world_size
    rounds = []
    for start in range(0, len(order), world_size):
        ranks = sorted(range(world_size), key=lambda rank: loads[rank])
        owned = dict(zip(ranks, order[start : start + world_size], strict=False))
        for rank, matrix in owned.items():
            loads[rank] += costs[matrix]
        rounds.append(dict(sorted(owned.items())))
    return rounds


def rows_of_ranks(rows: int, world_size: int) -> list[int]:
    """Return the number of rows of each rank, as `Shard(0)` and `torch.chunk` cut them.

    All have the same number, except for the last ones, which may have fewer, or none.
    """
    most = -(-rows // world_size)
    return [max(0, min(most, rows - rank * most)) for rank in range(world_size)]


def one_ahead(items: Iterable[Transfer]) -> Iterator[Transfer]:
    """Yield each transfer after the next one has started, so that both are on their way."""
    for item, _ in itertools.pairwise(itertools.chain(items, [None])):
        assert item is not None
        yield item


@dataclass
class Transfer:
    """The elements of a round's matrices, or of their results, on their way."""

    owned: dict[int, int]
    work: Any
    sent: Tensor  # must stay until the end
    received: Tensor  # those from rank 0, from rank 1, ...

    def wait(self) -> Tensor:
        """Return what was received; on a GPU, only its stream waits."""
        self.work.wait()
        return self.received


class MatrixExchange:
    """Applies a function to whole matrices whose rows are sharded over the ranks of a group.

    All ranks must make it with the same values, and make the same calls.

    Args:
        shapes: of the whole matrices, (rows, columns).
        costs: of each matrix, which decide on its owner; see `plan_rounds`.
        group: the ranks; they have each matrix's rows in their order, see `rows_of_ranks`.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], costs: Sequence[float], group: dist.ProcessGroup
    ) -> None:
        self._shapes = shapes
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._rounds = plan_rounds(costs, self._world_size)
        self._rows = [rows_of_ranks(rows, self._world_size) for rows, _ in shapes]

    def apply(
        self,
        shards_of: Callable[[list[int]], list[Tensor]],
        function: Callable[[int, Tensor], Tensor],
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Yield the numbers of each round's matrices, and this rank's shards of their results.

        Args:
            shards_of: returns this rank's shards, (its rows, columns), of the matrices with these
                numbers. All matrices have one dtype. The calls are up to two rounds ahead.
            function: returns a result of the shape and dtype of its matrix, (1, rows, columns),
                given the number of the matrix and the matrix.
        """
        gathers = one_ahead(self._gather(owned, shards_of) for owned in self._rounds)
        scatters = one_ahead(self._scatter(gather, function) for gather in gathers)
        for scatter in scatters:
            yield [*scatter.owned.values()], self._results(scatter)

    def _gather(
        self, owned: dict[int, int], shards_of: Callable[[list[int]], list[Tensor]]
    ) -> Transfer:
        """Start sending this rank's shards to the owners of their matrices."""
        shards = shards_of([*owned.values()])
        sent = torch.cat([shard.reshape(-1) for shard in shards])
        return self._start(owned, sent, self._shard_sizes(owned), self._matrix_sizes(owned))

    def _scatter(self, gather: Transfer, function: Callable[[int, Tensor], Tensor]) -> Transfer:
        """Wait for this rank's matrix, and start sending the shards of its result to all ranks."""
        owned = gather.owned
        result = gather.wait()
        if self._rank in owned:
            number = owned[self._rank]
            result = function(number, result.view(1, *self._shapes[number]))
        sizes = self._matrix_sizes(owned)
        return self._start(owned, result.reshape(-1), sizes, self._shard_sizes(owned))

    def _start(
        self, owned: dict[int, int], sent: Tensor, sizes: list[int], sizes_received: list[int]
    ) -> Transfer:
        received = sent.new_empty(sum(sizes_received))
        work = dist.all_to_all_single(
            received, sent, sizes_received, sizes, group=self._group, async_op=True
        )
        return Transfer(owned, work, sent, received)

    def _results(self, scatter: Transfer) -> list[Tensor]:
        """Wait for this rank's shards of the results of a round."""
        sizes = self._shard_sizes(scatter.owned)
        parts = torch.split(scatter.wait(), [sizes[rank] for rank in scatter.owned])
        return [
            part.view(self._rows[matrix][self._rank], self._shapes[matrix][1])
            for part, matrix in zip(parts, scatter.owned.values(), strict=True)
        ]

    def _shard_sizes(self, owned: dict[int, int]) -> list[int]:
        """Return the elements of this rank's shard of each rank's matrix."""
        sizes = [0] * self._world_size
        for rank, matrix in owned.items():
            sizes[rank] = self._rows[matrix][self._rank] * self._shapes[matrix][1]
        return sizes

    def _matrix_sizes(self, owned: dict[int, int]) -> list[int]:
        """Return the elements of each rank's shard of this rank's matrix."""
        if self._rank not in owned:
            return [0] * self._world_size
        matrix = owned[self._rank]
        return [rows * self._shapes[matrix][1] for rows in self._rows[matrix]]
