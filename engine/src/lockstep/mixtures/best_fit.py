"""Places documents in windows of T tokens by best fit.

A longer document first fills whole windows; what remains of it, and every shorter document, goes
where the least space stays free, the longest first (best-fit decreasing: Johnson 1974; for language
models Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). Each token but a split's
last is in one window, with the next token of the file as its target.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.settings import counted

Numbers = npt.NDArray[np.int64]

SCANNED = 1 << 26  # tokens that are searched at once for ends of documents


@dataclass(frozen=True)
class Packed:
    """What a split's windows consist of."""

    size: int  # tokens of a window
    windows: int
    pieces: int  # documents, and parts of long ones
    padding: int  # places in windows without a token
    documents: int
    empty: int  # of these, with no token but their end
    whole: int  # windows that begin with a document

    def __str__(self) -> str:
        """Describe the windows in one line."""
        whole = self.whole / self.windows
        padding = self.padding / (self.windows * self.size)
        return (
            f"{counted(self.documents, 'document')} in {counted(self.windows, 'window')}, of which "
            f"{whole:.1%} begin with a document; {padding:.2%} padding, no token lost"
        )


def ends_of_documents(tokens: npt.NDArray[Any], end: int) -> Numbers:
    """Return the place after each document, (documents,); the last may lack its end of text."""
    ends_in_stretches = [
        np.flatnonzero(tokens[place : place + SCANNED] == end) + place + 1
        for place in range(0, len(tokens), SCANNED)
    ]
    ends: Numbers = np.concatenate(ends_in_stretches)
    if len(ends) and ends[-1] == len(tokens):
        return ends
    return np.append(ends, len(tokens))


def windows_of(ends: Numbers, size: int) -> tuple[Numbers, npt.NDArray[np.int32], Numbers, Packed]:
    """Place documents that end before `ends` in windows of `size` tokens.

    Returns the place and length of each piece, (pieces,), in the order of windows; the number of
    each window's first piece, (windows + 1,); and the facts. In a window, documents come before
    remains of long ones, and a document without its end of text is the last: it would continue.
    """
    documents = np.diff(ends, prepend=0)
    begins = ends - documents
    lengths = documents.copy()
    lengths[-1] -= 1  # the split's last token is only a target
    full, rest = np.divmod(lengths, size)
    number = np.arange(full.sum()) - np.repeat(full.cumsum() - full, full)  # in its document
    cut = np.repeat(begins, full) + number * size
    left = np.flatnonzero(rest)
    bins, more = best_fit(rest[left], size)
    late = (full[left] > 0).astype(np.int8)
    late[left == len(lengths) - 1] = 2
    order = np.lexsort((left, late, bins))
    starts = np.concatenate([cut, (begins + full * size)[left][order]])
    pieces = np.concatenate([np.full(len(cut), size), rest[left][order]]).astype(np.int32)
    counts = np.concatenate([np.ones(len(cut), np.int64), np.bincount(bins, minlength=more)])
    first = np.concatenate([[0], counts.cumsum()])
    firsts = starts[first[:-1]]
    unbroken = np.isin(firsts, begins).sum()  # windows that begin with a document
    padding = len(counts) * size - int(lengths.sum())
    empty = int((documents == 1).sum())
    facts = Packed(size, len(counts), len(starts), padding, len(documents), empty, int(unbroken))
    return starts, pieces, first, facts


def best_fit(lengths: Numbers, size: int) -> tuple[Numbers, int]:
    """Return the bin of each of `lengths`, which are 1 to `size`, and the number of bins.

    Best-fit decreasing, for all pieces of one length and all bins with one free space at a time.
    """
    bins = np.empty(len(lengths), np.int64)
    made = 0  # bins
    order = np.argsort(-lengths, kind="stable")
    free: dict[int, list[Numbers]] = {}  # space -> bins with it
    spaces: list[int] = []  # its keys, ascending

    def put(space: int, bins_with_it: Numbers) -> None:
        if space and len(bins_with_it):
            if space not in free:
                insort(spaces, space)
            free.setdefault(space, []).append(bins_with_it)

    for same in _equal(lengths[order]):
        items = order[same]
        length = int(lengths[items[0]])
        placed = 0  # items that have a bin
        while placed < len(items):
            # All go into the fullest bins that have space, or into new ones.
            place = bisect_left(spaces, length)
            space = size
            if place < len(spaces):
                space = spaces.pop(place)
            per_bin = space // length  # until it has no space for more
            wanted = -(-(len(items) - placed) // per_bin)
            if space in free:
                candidates = np.concatenate(free.pop(space))
                put(space, candidates[wanted:])
            else:
                candidates = np.arange(made, made + wanted)
                made += wanted
            chosen = candidates[:wanted]
            taken = items[placed : placed + wanted * per_bin][: len(chosen) * per_bin]
            bins[taken] = np.repeat(chosen, per_bin)[: len(taken)]
            placed += len(taken)
            filled, rest = divmod(len(taken), per_bin)
            put(space - per_bin * length, chosen[:filled])
            put(space - rest * length, chosen[filled:])
    return bins, made


def _equal(ordered: Numbers) -> Iterator[slice]:
    """Yield a slice for each value of an ordered array."""
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for start, end in pairwise(edges):
        if start < end:
            yield slice(start, end)
