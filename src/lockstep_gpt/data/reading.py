"""Reads samples so that their random numbers depend on seed and position, not on who reads them."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep_gpt import numpy_patches
from lockstep_gpt.data.order import Places, Positions

Collate = Callable[[Any], Any]  # samples, as the dataset returns them -> a batch
Pad = Callable[[Any, int], Any]  # a batch, and how many of its rows are real -> one that says so


def read(dataset: Any, samples: Positions) -> Sequence[Any]:
    """Return samples; at once, if the dataset has torch's `__getitems__` for that."""
    numbers = np.maximum(samples, 0).tolist()  # padding repeats the first sample
    if hasattr(dataset, "__getitems__"):
        items: Sequence[Any] = dataset.__getitems__(numbers)
        return items
    return [dataset[number] for number in numbers]


class BatchReader(Dataset[Any]):
    """Reads micro-batches; each sample's random numbers are its own.

    They come from the global generators of torch, NumPy, and Python, which are seeded for each
    sample by its position in the run. That costs 10 us, so a dataset goes without, until a read
    has drawn a number; that read is repeated.

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
        self.draws = False  # whether samples draw random numbers, as far as reads have shown
        self._python: Any = random.getstate()  # after the last read; to ask takes 10 us
        self._is_shared = False  # whether others draw from it between reads

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
        if not self.draws:
            items = self._read_unless_drawn(places.samples)
            if items is not None:
                return items
            self.draws = True
        with preserved_generators():
            return [self._read_one(*place) for place in zip(*places, strict=True)]

    def _read_one(self, position: int, sample: int) -> Any:
        seed_generators(f"{self.seed} {position}")
        return read(self.dataset, np.array([sample]))[0]

    def _read_unless_drawn(self, samples: Positions) -> Sequence[Any] | None:
        """Return the samples, or None if reading them draws random numbers."""
        if self._is_shared:
            self._python = random.getstate()
        before = quick_states()
        items = read(self.dataset, samples)
        if quick_states() != before:
            return None
        earlier, self._python = self._python, random.getstate()
        if self._python == earlier:
            return items
        if self._is_shared:
            return None
        self._is_shared = True  # or it was this read: another one tells
        return self._read_unless_drawn(samples)


def quick_states() -> tuple[bytes, bytes | None]:
    """Return the states of the generators of torch and NumPy; Python's takes 10 us."""
    return torch.default_generator.get_state().numpy().tobytes(), numpy_patches.global_state()


def seed_generators(key: str) -> None:
    """Seed the global generators of torch, NumPy, and Python by a hash of `key`."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002  (the generator that datasets use)
    random.seed(number)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Let a read leave no trace in the generators, which training may use; a worker has its own."""
    if get_worker_info() is not None:
        yield
        return
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
