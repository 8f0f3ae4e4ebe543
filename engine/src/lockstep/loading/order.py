"""Which sample each rank sees at each step: a pure function, not a shuffled list.

Each training sample has a *global* position in the run: 0, 1, 2, ... across all ranks, without
end. Position p is in epoch p // size, and a keyed permutation of that epoch maps it to a sample.
So one integer is enough to resume a run at the exact sample, at any world size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lockstep.loading.permutation import permute

Positions = npt.NDArray[np.int64]
Order = Callable[[Positions], Positions]  # positions of a run, any shape -> samples

CHUNK = 32_768  # samples that are drawn at once: one by one costs 1000 times as much
FIRST_CHUNK = 1024  # it doubles: an epoch may be short


@runtime_checkable
class HasPast(Protocol):
    """An order that settings decide which a resume may change, as long as its past stays."""

    def past(self, samples: int) -> dict[str, Any]:
        """Return, as plain values, what decides the first `samples` positions."""

    def refuse_other_past(self, past: dict[str, Any]) -> None:
        """Raise a `UserError` if this order has another past."""


@dataclass(frozen=True)
class Shuffled:
    """The samples of a dataset in an order of their own in each epoch.

    >>> Shuffled(5, seed=1)(np.arange(10)).tolist()
    [0, 4, 2, 3, 1, 3, 1, 0, 2, 4]

    Args:
        size: samples of the dataset.
        seed: decides the order of each epoch.
    """

    size: int
    seed: int

    def __call__(self, positions: Positions) -> Positions:
        """Return the samples at global `positions` of any shape, which may span epochs."""
        epochs, offsets = np.divmod(positions, self.size)
        if epochs.size and epochs.min() == epochs.max():  # the usual case
            epoch = int(epochs.min())
            return permute(offsets.ravel(), self.size, self.seed, epoch).reshape(offsets.shape)
        result = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            result[in_epoch] = permute(offsets[in_epoch], self.size, self.seed, int(epoch))
        return result


class Places(NamedTuple):
    """The samples of a micro-batch, (B,), and the position of the first one in the run."""

    first: int
    samples: Positions


@dataclass(frozen=True)
class RankOrder:
    """The training samples of one rank, in micro-batches without end; each iteration begins anew.

    An optimizer step of W ranks with A micro-steps each uses the next K = W A micro-batches. Rank
    r uses A of them, starting at r A. So micro-batch k of a step has the same samples for any W
    and A with the same K, and neighbors are on one rank, which can sum their gradients.
    """

    order: Order
    micro_size: int  # B
    rank: int
    world_size: int
    accumulation: int = 1  # micro-steps per optimizer step, A
    start: int = 0  # samples that the run has already seen

    def __iter__(self) -> Iterator[Places]:
        """Yield micro-batches without end."""
        first = 0
        chunk = FIRST_CHUNK
        while True:
            batches = max(1, chunk // self.micro_size)
            steps, leaves = np.divmod(first + np.arange(batches), self.accumulation)
            blocks = (steps * self.world_size + self.rank) * self.accumulation
            starts = self.start + (blocks + leaves) * self.micro_size
            positions = starts[:, None] + np.arange(self.micro_size)  # (batches, B)
            yield from map(Places, starts.tolist(), self.order(positions))
            first += batches
            chunk = min(CHUNK, 2 * chunk)


def spread(numbers: Positions, size: int, count: int) -> Positions:
    """Return the samples at these of `count` places that are spread evenly over `size` samples."""
    # floor(i * size / count), in two parts because i * size could overflow
    times, rest = divmod(size, count)
    return numbers * times + numbers * rest // count


class Part(NamedTuple):
    """The samples of a batch for evaluation: those from `first` to before `end`."""

    first: int
    end: int


def eval_parts(
    size: int, micro_size: int, rank: int, world_size: int, *, whole: bool
) -> list[Part]:
    """Return one rank's batches, which contain each sample once over all ranks.

    Args:
        size: samples of the dataset.
        micro_size: most samples of a batch.
        rank: the rank.
        world_size: the number of ranks.
        whole: all batches but the last have `micro_size` samples: then they are the same for any
            number of ranks, of which some may have one batch less. Otherwise, each rank has the
            same number of batches, of about the same size, if there are enough samples.
    """
    count = -(-size // micro_size)
    if whole:
        bounds = np.minimum(np.arange(count + 1) * micro_size, size)
    else:
        count = min(size, -(-count // world_size) * world_size)
        bounds = np.arange(count + 1) * size // count
    return [Part(int(bounds[at]), int(bounds[at + 1])) for at in range(rank, count, world_size)]
