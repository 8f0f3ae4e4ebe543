"""A sampler for your own loops, with the project's order of samples."""

from collections.abc import Iterator

import numpy as np
from lockstep.loading.order import CHUNK
from lockstep.loading.permutation import permute


class EpochSampler:
    """The windows of one rank, an epoch at a time: `DistributedSampler`'s contract with our order.

    For your own loops and datasets; it needs the memory of `CHUNK` windows. Ranks take whole
    micro-batches alternately, as in a run without accumulation, and all get the same number. If an
    epoch does not divide evenly, its tail is dropped or, with `drop_last=False`, filled up with
    windows from its beginning.
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
        """Choose the epoch, initially 0; each epoch has a different order."""
        self.epoch = epoch

    def __len__(self) -> int:
        steps, rest = divmod(self.size, self.micro_size * self.world_size)
        if rest and not self.drop_last:
            steps += 1
        return steps * self.micro_size

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), CHUNK):
            batch, place = np.divmod(
                np.arange(first, min(first + CHUNK, len(self))), self.micro_size
            )
            positions = (batch * self.world_size + self.rank) * self.micro_size + place
            windows = permute(positions % self.size, self.size, self.seed, self.epoch)
            yield from windows.tolist()
