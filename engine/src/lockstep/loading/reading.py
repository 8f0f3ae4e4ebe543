"""Reads samples so that their random numbers depend on seed and position, not on who reads them."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep.loading.order import Places, Positions
from lockstep.patches import numpy as numpy_patches
from lockstep.patches import python as python_patches

Collate = Callable[[Any], Any]  # samples, as the dataset returns them -> a batch
Pad = Callable[[Any, int], Any]  # a batch, and how many of its rows are real -> one that says so


class Generator(NamedTuple):
    """A global generator of random numbers."""

    glance: Callable[[], bytes]  # returns what changes when it draws
    seed: Callable[[int], Any]  # takes 63 bits
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


# ruff: noqa: NPY002  (NumPy's global generator is the one that datasets use)
GENERATORS = (
    Generator(
        lambda: torch.default_generator.get_state().numpy().tobytes(),
        torch.default_generator.manual_seed,
        torch.get_rng_state,
        torch.set_rng_state,
    ),
    Generator(
        numpy_patches.random_state,
        lambda number: np.random.seed(number % 2**32),
        np.random.get_state,
        np.random.set_state,
    ),
    Generator(python_patches.random_state, random.seed, random.getstate, random.setstate),
)


def read(dataset: Any, samples: Positions) -> Sequence[Any]:
    """Return samples; at once, if the dataset has torch's `__getitems__` for that."""
    numbers = samples.tolist()
    if numbers[-1] < 0:
        numbers = [max(number, 0) for number in numbers]  # padding repeats the first sample
    if hasattr(dataset, "__getitems__"):
        items: Sequence[Any] = dataset.__getitems__(numbers)
        return items
    return [dataset[number] for number in numbers]


class BatchReader(Dataset[Any]):
    """Reads micro-batches; each sample's random numbers are its own.

    They come from the global generators of torch, NumPy, and Python. Those that samples draw from
    are seeded for each sample by its position in the run. That takes microseconds, so a generator
    isn't seeded until a read has drawn from it; that read is repeated.

    Args:
        dataset: its samples may draw from global generators; others are not seeded.
        seed: of the run.
        collate: makes a batch of samples, as the dataset returns them.
        pad: returns a batch whose rows from a number on count nothing.
    """

    def __init__(
        self, dataset: Any, seed: int | str, collate: Collate, pad: Pad | None = None
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate
        self.pad = pad
        self.drawn: list[int] = []  # generators that samples draw from, as far as reads have shown
        self._glances: list[bytes] | None = None  # of the others, after the last read

    def __getitems__(self, places: Places) -> Any:
        """Return a micro-batch; sample -1 is padding."""
        return self._batch_of(places, self._read(places))

    def read_group(self, group: Sequence[Places]) -> Iterator[Any]:
        """Yield micro-batches of samples that draw no random numbers; all are read at once."""
        items = read(self.dataset, np.concatenate([places.samples for places in group]))
        first = 0
        for places in group:
            last = first + len(places.samples)
            yield self._batch_of(places, items[first:last])
            first = last

    def _batch_of(self, places: Places, items: Sequence[Any]) -> Any:
        batch = self.collate(items)
        if self.pad is None:
            return batch
        real = int(np.count_nonzero(places.samples >= 0))
        return self.pad(batch, real) if real < len(places.samples) else batch

    def _read(self, places: Places) -> Sequence[Any]:
        """Return the samples of a micro-batch."""
        others = [at for at in range(len(GENERATORS)) if at not in self.drawn]
        before = self._glances
        if before is None:
            before = [GENERATORS[at].glance() for at in others]
        if self.drawn:
            items = self._read_seeded(places)
        else:
            items = read(self.dataset, places.samples)
        after = [GENERATORS[at].glance() for at in others]
        new = [at for at, *two in zip(others, before, after, strict=True) if two[0] != two[1]]
        if get_worker_info() is not None:  # nobody else draws there
            self._glances = None if new else after
        if not new:
            return items
        self.drawn += new
        return self._read(places)

    def _read_seeded(self, places: Places) -> Sequence[Any]:
        generators = [GENERATORS[at] for at in self.drawn]
        items = []
        with preserved(generators):
            for position, sample in enumerate(places.samples.tolist(), places.first):
                number = hash_of(self.seed, position)
                for generator in generators:
                    generator.seed(number)
                items.append(self.dataset[max(sample, 0)])
        return items


def hash_of(seed: int | str, position: int) -> int:
    """Return 63 bits that depend on both."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@contextlib.contextmanager
def preserved(generators: Sequence[Generator]) -> Iterator[None]:
    """Let a read leave no trace in generators, which training may use; a worker has its own."""
    if get_worker_info() is not None:
        yield
        return
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
