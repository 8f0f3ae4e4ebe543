"""Which window of tokens each rank sees at each step: a pure function, not a shuffled list.

Each training sample has a *global* position in the run: 0, 1, 2, ... across all ranks, without
end. Position p is in epoch p // size, and a keyed permutation of that epoch maps it to a window.
So one integer is enough to resume a run at the exact sample, at any world size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Rule = Callable[[Positions, int, int], Positions]  # positions, size, seed -> windows

ROUNDS = 8  # even, so that each half is changed equally often
FEW = 128  # for fewer windows, halves of so few bits reach only some of all orders
CHUNK = 4096  # windows that `Order.stream` draws at once: one by one costs 100 times as much


def permute(indices: Positions, size: int, seed: int, epoch: int) -> Positions:
    """Map `indices` by a permutation of range(size) that is keyed by `(seed, epoch)`.

    A Feistel network permutes the smallest range(2**bits) that contains range(size). Values outside
    go through again until they are inside (cycle walking: Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", section 4), less than twice on average. Nothing is stored but the
    result; `size` may be up to 2**62. Below `FEW` windows, every order is equally likely.
    """
    assert 1 <= size <= 1 << 62, size
    if size < FEW:
        return _shuffled(size, seed, epoch)[indices]
    bits = max(2, (size - 1).bit_length())
    keys = round_keys(seed, epoch)
    result = feistel(indices.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        again = feistel(result[outside], bits, keys)
        result[outside] = again
        outside = outside[again >= size]
    return result.astype(np.int64)


@lru_cache(maxsize=256)
def _shuffled(size: int, seed: int, epoch: int) -> Positions:
    """Sort random draws; NumPy guarantees that raw draws stay the same in later versions."""
    draws = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)
    return np.argsort(draws, kind="stable")


@lru_cache(maxsize=256)
def round_keys(seed: int, epoch: int) -> Words:
    """Draw one key per round; `spawn_key` keeps (seed, epoch) pairs distinct for any seed."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return sequence.generate_state(ROUNDS, np.uint64).astype(np.uint64)


def feistel(values: Words, bits: int | Positions, keys: Words) -> Words:
    """Permute range(2**bits); the halves change alternately, as they may differ by one bit."""
    low_bits = bits // 2
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    high, low = values >> np.uint64(low_bits), values & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ (_mix(low + even) & high_mask)
        low = low ^ (_mix(high + odd) & low_mask)
    return (high << np.uint64(low_bits)) | low


def _mix(words: Words) -> Words:
    """Spread every bit over all 64: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def windows(positions: Positions, size: int, seed: int) -> Positions:
    """Return the windows at global `positions` of any shape; one batch may span two epochs."""
    epochs, offsets = np.divmod(positions, size)
    result = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = permute(offsets[here], size, seed, int(epoch))
    return result


@dataclass(frozen=True)
class Order:
    """The training windows of one rank.

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

    def stream(self) -> Iterator[Positions]:
        """Yield micro-batches without end, each (B,)."""
        count = max(1, CHUNK // self.micro_size)
        first = 0
        while True:
            steps, leaves = np.divmod(first + np.arange(count), self.accumulation)
            blocks = (steps * self.world_size + self.rank) * self.accumulation
            starts = self.start + (blocks + leaves) * self.micro_size
            positions = starts[:, None] + np.arange(self.micro_size)  # (count, B)
            yield from self.rule(positions, self.size, self.seed)
            first += count


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
