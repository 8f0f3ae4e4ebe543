"""Which window of tokens each rank sees at each step: a pure function, not a shuffled list.

Each training sample has a *global* position in the run: 0, 1, 2, ... across all ranks, without
end. Position p is in epoch p // size, and a keyed permutation of that epoch maps it to a window.
So one integer is enough to resume a run at the exact sample, at any world size.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep_gpt.data.permutation import permute

Positions = npt.NDArray[np.int64]
Rule = Callable[[Positions, int, int], Positions]  # positions, size, seed -> windows

CHUNK = 4096  # windows that `Order` draws at once: one by one costs 100 times as much


def windows(positions: Positions, size: int, seed: int) -> Positions:
    """Return the windows at global `positions` of any shape; one batch may span two epochs."""
    epochs, offsets = np.divmod(positions, size)
    result = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        result[in_epoch] = permute(offsets[in_epoch], size, seed, int(epoch))
    return result


@dataclass(frozen=True)
class Order:
    """The training windows of one rank, in micro-batches without end; each iteration begins anew.

    An optimizer step of W ranks with A micro-steps each uses the next K = W A micro-batches. Rank
    r uses A of them, starting at r A. So micro-batch k of a step has the same samples for any W
    and A with the same K, and neighbors are on one rank, which can sum their gradients.
    """

    seed: int
    size: int  # windows in an epoch
    micro_size: int  # B
    rank: int
    world_size: int
    accumulation: int = 1  # micro-steps per optimizer step, A
    start: int = 0  # samples that the run has already seen
    rule: Rule = windows

    def __iter__(self) -> Iterator[Positions]:
        """Yield micro-batches without end, each (B,)."""
        batches = max(1, CHUNK // self.micro_size)  # drawn at once
        for first in itertools.count(0, batches):
            steps, leaves = np.divmod(first + np.arange(batches), self.accumulation)
            blocks = (steps * self.world_size + self.rank) * self.accumulation
            starts = self.start + (blocks + leaves) * self.micro_size
            positions = starts[:, None] + np.arange(self.micro_size)  # (batches, B)
            yield from self.rule(positions, self.size, self.seed)


def validation_rows(
    size: int, count: int, micro_size: int, rank: int, world_size: int
) -> Positions:
    """Return one rank's validation windows in micro-batches, shape (batches, micro_size).

    Spreads `count` of `size` windows evenly, each exactly once across all ranks. Every rank gets
    the same number of micro-batches, all of one shape; -1 fills the rest when windows run out.
    """
    batches = -(-count // (micro_size * world_size))
    starts = (np.arange(batches) * world_size + rank) * micro_size
    numbers = starts[:, None] + np.arange(micro_size)
    # floor(i * size / count), in two parts because i * size could overflow
    spread = numbers * (size // count) + numbers * (size % count) // count
    return np.where(numbers < count, spread, -1)


def rows_by_part(
    counts: Mapping[str, int],
    used: Mapping[str, int],
    micro_size: int,
    rank: int,
    world_size: int,
) -> dict[str, Positions]:
    """Return one rank's `validation_rows` of each part of a corpus, (batches, micro_size).

    Args:
        counts: windows of each part, in the order that numbers them over all parts.
        used: how many windows of each part to spread evenly over it.
        micro_size: windows in a micro-batch.
        rank: the rank.
        world_size: the number of ranks.
    """
    parts = {}
    first = 0
    for name, size in counts.items():
        rows = validation_rows(size, used[name], micro_size, rank, world_size)
        parts[name] = np.where(rows < 0, rows, rows + first)
        first += size
    return parts
