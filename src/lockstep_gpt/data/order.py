"""Which window of tokens each rank sees at each step: a pure function, not a shuffled list.

A training sample's place in the run is its *global* position: 0, 1, 2, ... over all ranks and
without end. Position p lies in epoch p // size, and a keyed permutation of that epoch says which
window it is. So a run resumes from one integer, to the sample, at any world size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8  # even: each half is changed as often as the other
FEW = 128  # windows, below which halves of so few bits reach only some of all orders
CHUNK = 4096  # windows drawn at a time by `Order.stream`: one by one costs 100 times as much


def permute(indices: Positions, size: int, seed: int, epoch: int) -> Positions:
    """Return where a permutation of range(size), keyed by `(seed, epoch)`, sends `indices`.

    A Feistel network permutes the smallest range of 2**bits that holds `size`; what falls outside
    goes through again until it is inside (cycle walking: Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", section 4), less than twice in the mean. Takes no memory but its
    result; `size` may be up to 2**62. Of fewer than `FEW` windows each order is equally likely.
    """
    assert 1 <= size <= 1 << 62, size
    if size < FEW:
        return _shuffled(size, seed, epoch)[indices]
    bits = max(2, (size - 1).bit_length())
    keys = _round_keys(seed, epoch)
    result = _feistel(indices.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        again = _feistel(result[outside], bits, keys)
        result[outside] = again
        outside = outside[again >= size]
    return result.astype(np.int64)


@lru_cache(maxsize=8)
def _shuffled(size: int, seed: int, epoch: int) -> Positions:
    """Sort random draws; NumPy promises that these raw ones stay the same in later versions."""
    draws = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)
    return np.argsort(draws, kind="stable")


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> Words:
    """Draw one key per round; `spawn_key` keeps (seed, epoch) pairs apart for seeds of any size."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return sequence.generate_state(ROUNDS, np.uint64).astype(np.uint64)


def _feistel(values: Words, bits: int, keys: Words) -> Words:
    """Permute range(2**bits); the halves may differ by one bit, so they take turns."""
    low_bits = bits // 2
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    high, low = values >> np.uint64(low_bits), values & low_mask
    for even, odd in keys.reshape(-1, 2):
        high = high ^ (_mix(low + even) & high_mask)
        low = low ^ (_mix(high + odd) & low_mask)
    return (high << np.uint64(low_bits)) | low


def _mix(words: Words) -> Words:
    """Spread every bit over all 64: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def windows(positions: Positions, size: int, seed: int) -> Positions:
    """Return the windows at global `positions` of any shape; one batch may straddle epochs."""
    epochs, offsets = np.divmod(positions, size)
    result = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = permute(offsets[here], size, seed, int(epoch))
    return result


@dataclass(frozen=True)
class Order:
    """The training windows of one rank.

    An optimizer step of W ranks with A micro-steps each takes the next K = W A micro-batches, and
    rank r the block of them from r A on. So micro-batch k of a step has the same samples whatever
    W and A are, and neighbors are on one rank, which can add up what they give.
    """

    seed: int
    size: int  # windows in an epoch
    micro_size: int  # B
    rank: int
    world_size: int
    accumulation: int = 1  # micro-steps per optimizer step, A
    start: int = 0  # samples that the run has seen before

    def stream(self, first: int, stride: int = 1) -> Iterator[Positions]:
        """Yield micro-batches `first`, `first + stride`, ... without end, each (B,)."""
        count = max(1, CHUNK // self.micro_size)
        while True:
            numbers = first + stride * np.arange(count)
            steps, leaves = np.divmod(numbers, self.accumulation)
            blocks = (steps * self.world_size + self.rank) * self.accumulation
            starts = self.start + (blocks + leaves) * self.micro_size
            positions = starts[:, None] + np.arange(self.micro_size)  # (count, B)
            yield from windows(positions, self.size, self.seed)
            first += stride * count


def validation_rows(
    size: int, count: int, micro_size: int, rank: int, world_size: int
) -> Positions:
    """Return one rank's validation windows in micro-batches, shape (batches, micro_size).

    `count` of `size` windows, spread evenly, each exactly once over all ranks. Every rank gets
    the same number of micro-batches, of one shape; where windows run out, -1 stands.
    """
    batches = -(-count // (micro_size * world_size))
    starts = (np.arange(batches) * world_size + rank) * micro_size
    numbers = starts[:, None] + np.arange(micro_size)
    # floor(i * size / count), in two parts because i * size could overflow
    spread = numbers * (size // count) + numbers * (size % count) // count
    return np.where(numbers < count, spread, -1)
