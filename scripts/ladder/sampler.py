"""A sampler for loops of one's own: the order of samples is the project's."""

from collections.abc import Iterator

import numpy as np

from lockstep_gpt.data.order import CHUNK, permute


class EpochSampler:
    """The windows of one rank, an epoch at a time: `DistributedSampler`'s contract over our order.

    For loops and data sets of one's own; it takes the memory of `CHUNK` windows. Ranks take turns
    by whole micro-batches, as in a run that accumulates nothing, and all have as many: the tail of
    an epoch that does not divide is dropped, or with `drop_last=False` filled up with windows from
    its beginning.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        micro_size: int = 1,
        drop_last: bool = True,
    ) -> None:
        self.size, self.seed, self.rank, self.world_size = size, seed, rank, world_size
        self.micro_size, self.drop_last, self.epoch = micro_size, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 at first: each has an order of its own."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(self.size, self.micro_size * self.world_size)
        return (whole + bool(rest and not self.drop_last)) * self.micro_size

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), CHUNK):
            batch, place = np.divmod(
                np.arange(first, min(first + CHUNK, len(self))), self.micro_size
            )
            positions = (batch * self.world_size + self.rank) * self.micro_size + place
            windows = permute(positions % self.size, self.size, self.seed, self.epoch)
            yield from windows.tolist()
