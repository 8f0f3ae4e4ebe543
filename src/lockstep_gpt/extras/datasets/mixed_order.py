"""Which source and window each position of a run takes, and the batches of a mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import DataConfig
from lockstep_gpt.data import shards
from lockstep_gpt.data.datamodule import Feed, TokenDataModule
from lockstep_gpt.data.order import (
    FEW,
    Order,
    Positions,
    Words,
    feistel,
    round_keys,
    validation_rows,
    windows,
)
from lockstep_gpt.data.prepare import SPLITS
from lockstep_gpt.extras.mixtures.mixed_windows import windows_by_source
from lockstep_gpt.extras.mixtures.mixture_settings import MixtureData
from lockstep_gpt.extras.mixtures.shares import phases
from lockstep_gpt.extras.mixtures.turns import Turns
from lockstep_gpt.registry import asked


class MixedOrder:
    """The window of each position: whose turn it is, and which of its windows comes next.

    A pure function of seed, shares, sizes, and position. Each source has its own permutation in
    each of its epochs; its name, not the other sources, decides it.
    """

    def __init__(self, data: MixtureData, sizes: Mapping[str, int], planned: int) -> None:
        """Take settings, each source's training windows, and the windows of the run."""
        self.sizes, self.phases = dict(sizes), phases(data, sizes, planned)
        self.turns = Turns(self.phases)
        self._sizes = np.array([*sizes.values()])
        self._bits = np.array([(size - 1).bit_length() for size in sizes.values()])
        self._first = np.cumsum(self._sizes) - self._sizes

    def windows(self, positions: Positions, _size: int, seed: int) -> Positions:
        """Return the window at each of `positions`, any shape, numbered over all sources."""
        sources, numbers = self.turns.at(positions.ravel())
        seeds = [seed_of(seed, name) for name in self.sizes]
        sizes, result = self._sizes[sources], np.empty_like(numbers)
        for place in np.flatnonzero(self._sizes < FEW):
            here = sources == place
            result[here] = windows(numbers[here], int(self._sizes[place]), seeds[place])
        large = np.flatnonzero(sizes >= FEW)
        epochs = numbers[large] // sizes[large]
        for epoch in np.unique(epochs).tolist():
            here = large[epochs == epoch]
            keys = np.stack([round_keys(each, epoch) for each in seeds], axis=1)
            result[here] = self._permuted(numbers[here] - epoch * sizes[here], sources[here], keys)
        total: Positions = result + self._first[sources]
        return total.reshape(positions.shape)

    def _permuted(
        self, offsets: Positions, sources: npt.NDArray[np.uint8], keys: Words
    ) -> Positions:
        """Return `order.permute` of the sources' offsets, all (N,), by their keys, (8, sources).

        A call of it for each source would cost more than the rest of the order.
        """
        sizes, bits, own = self._sizes[sources], self._bits[sources], keys[:, sources]
        result, outside = offsets.astype(np.uint64), np.arange(len(offsets))
        while outside.size:
            again = feistel(result[outside], bits[outside], own[:, outside])
            result[outside] = again
            outside = outside[again >= sizes[outside]]
        return result.astype(np.int64)

    def counts(self, position: int) -> dict[str, int]:
        """Return how many windows of each source come before `position`."""
        return dict(zip(self.sizes, self.turns.counts(position).tolist(), strict=True))

    def epochs(self, position: int) -> dict[str, float]:
        """Return how often each source was taken before `position`."""
        return {name: each / self.sizes[name] for name, each in self.counts(position).items()}


@cache
def seed_of(seed: int, name: str) -> int:
    """Return the seed of a source's permutations."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])


def mixed_order(data: MixtureData, folder: Path, block_size: int, samples: int) -> MixedOrder:
    """Return the order of a run of so many `samples` on a prepared mixture."""
    planned = samples
    if data.planned_tokens is not None:
        planned = max(1, data.planned_tokens // block_size)
    return MixedOrder(data, sizes_of(data, folder, "train", block_size), planned)


def own_windows(data: MixtureData) -> Any:
    """Return another extra's class of data modules that makes these sources' windows, or None."""
    return next(filter(None, asked("WINDOWS_OF_SOURCES", data)), None)


def sizes_of(data: MixtureData, folder: Path, split: str, block_size: int) -> dict[str, int]:
    """Return how many windows of a split each source has, in the order that numbers them."""
    index = shards.load_index(folder)
    sizes = windows_by_source(index, split, block_size)
    if (other := own_windows(data)) is None:
        return sizes
    counts = other.counts(folder, block_size)
    return {name: counts[f"{name}/{split}"] for name in sizes}


class MixedDataModule(TokenDataModule):
    """Batches of a mixture; each validation batch is of one source."""

    def __init__(self, data: MixtureData, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        limit, block_size = settings.get("val_tokens"), self.block_size
        self.data = data
        self._orders: dict[int, MixedOrder] = {}  # by the samples of the run
        self.sizes = {name: sizes_of(data, folder, name, block_size) for name in SPLITS}
        self.train_windows, self.held_out = sum(self.sizes["train"].values()), self.sizes["val"]
        self.validated = dict(self.held_out)
        if limit is not None:
            most = max(1, limit // len(self.held_out) // block_size)
            self.validated = {name: min(most, each) for name, each in self.held_out.items()}
        self.val_windows_held_out = sum(self.held_out.values())
        self.val_windows = sum(self.validated.values())

    @property
    def order(self) -> MixedOrder:
        """The order of the attached Trainer's run."""
        total = self.samples_seen(self._attached_trainer().max_steps)
        if total not in self._orders:
            self._orders[total] = mixed_order(self.data, self.folder, self.block_size, total)
        return self._orders[total]

    def train_dataloader(self) -> Feed:
        """Return endless batches, starting at the Trainer's current step."""
        vars(self)["order_of"] = partial(Order, rule=self.order.windows)
        return super().train_dataloader()

    def val_dataloader(self) -> Feed:
        """Return batches that contain every validation window once across all ranks."""
        rows = self.rows_by_source()
        return self.feed("val", partial(_share, np.concatenate([*rows.values()])))

    def sources_of(self, split: str, rows: Positions) -> list[str]:
        """Return the name of each window's source; of padding, -1, any."""
        names, ends = [*self.sizes[split]], np.cumsum([*self.sizes[split].values()])
        return [names[place] for place in np.searchsorted(ends, rows, "right")]

    def rows_by_source(self) -> dict[str, Positions]:
        """Return this rank's validation windows of each source, (batches, B) with -1 as padding."""
        trainer, found = self._attached_trainer(), {}
        starts = accumulate(self.held_out.values(), initial=0)
        for (name, size), start in zip(self.held_out.items(), starts, strict=False):
            ranks = trainer.global_rank, trainer.world_size
            rows = validation_rows(size, self.validated[name], self.micro_size, *ranks)
            found[name] = np.where(rows < 0, rows, rows + start)
        return found


def _share(rows: Positions, worker: int, workers: int) -> Iterable[Positions]:
    return rows[worker::workers]


def data_module(data: DataConfig) -> Callable[..., TokenDataModule] | None:
    """Return what makes the data module of a mixture; another extra may make its windows."""
    if not isinstance(data, MixtureData):
        return None
    other = own_windows(data)
    kind = MixedDataModule if other is None else type("Mixed", (MixedDataModule, other), {})
    return partial(kind, data)
