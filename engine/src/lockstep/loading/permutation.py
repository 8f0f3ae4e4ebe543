"""A random permutation of any size that is computed, not stored: a keyed Feistel network."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8  # even, so that each half is changed equally often
_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)
FEW = 128  # for smaller sizes, halves of so few bits reach only some of all orders


def permute(indices: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Map `indices` by a permutation of range(size) that is keyed by `(seed, epoch)`.

    A Feistel network permutes the smallest range(2**bits) that contains range(size). Values outside
    go through again until they are inside (cycle walking: Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", section 4), less than twice on average. Nothing is stored but the
    result; `size` may be up to 2**62. Below `FEW`, every order is equally likely.

    >>> permute(np.arange(5), size=5, seed=1, epoch=0).tolist()
    [0, 4, 2, 3, 1]
    """
    assert 1 <= size <= 1 << 62, size
    if size < FEW:
        return _shuffled(size, seed, epoch)[indices]
    bits = max(2, (size - 1).bit_length())
    keys = round_keys(seed, epoch)
    result = feistel(indices.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        moved = feistel(result[outside], bits, keys)
        result[outside] = moved
        outside = outside[moved >= size]
    return result.astype(np.int64)


@lru_cache(maxsize=256)
def _shuffled(size: int, seed: int, epoch: int) -> Indices:
    """Sort random draws; NumPy guarantees that raw draws stay the same in later versions."""
    draws = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)
    return np.argsort(draws, kind="stable")


@lru_cache(maxsize=256)
def round_keys(seed: int, epoch: int) -> Words:
    """Draw one key per round; `spawn_key` keeps (seed, epoch) pairs distinct for any seed."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return sequence.generate_state(ROUNDS, np.uint64).astype(np.uint64)


def feistel(values: Words, bits: int | Indices, keys: Words) -> Words:
    """Permute range(2**bits); the halves change alternately, as they may differ by one bit."""
    low_bits = bits // 2
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    high = values >> np.uint64(low_bits)
    low = values & low_mask
    mixed = np.empty_like(low)
    space = np.empty_like(low)  # new arrays would cost as much as the arithmetic
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        np.add(low, even, out=mixed)
        _mix(mixed, space)
        mixed &= high_mask
        high ^= mixed
        np.add(high, odd, out=mixed)
        _mix(mixed, space)
        mixed &= low_mask
        low ^= mixed
    high <<= np.uint64(low_bits)
    high |= low
    return high


def _mix(words: Words, space: Words) -> None:
    """Spread every bit over all 64: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    for shift, factor in _STEPS:
        np.right_shift(words, shift, out=space)
        words ^= space
        words *= factor
    np.right_shift(words, _LAST_SHIFT, out=space)
    words ^= space
