"""Windows of a split's tokens: each is a sample, numbered from 0, that batches are made of."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.shards import check_sizes, load_index, open_splits
from lockstep_gpt.model.functional import IGNORE

Batch = tuple[Tensor, Tensor]  # tokens and targets, each (B, T) and int64


class Stored(NamedTuple):
    """A batch as it travels to a device."""

    ids: Tensor  # in their narrow stored type; only the windows know the shape
    real: Any  # what the windows need to know to tell padding from tokens


class Windows(Protocol):
    """The windows of one split of a prepared folder, mapped, not loaded."""

    counts: dict[str, int]  # windows of each part of the corpus, in the order that numbers them
    has_padding: bool  # whether a window of training may have targets that don't count

    def gather(self, batches: Sequence[Positions], pinned: bool = False) -> Iterator[Stored]:
        """Copy the windows with these numbers and yield each batch; -1 at its end is padding.

        Args:
            batches: the windows of each batch, (B,).
            pinned: whether to use memory from which a GPU copies while the host continues.
        """

    def widen(self, stored: Stored) -> Batch:
        """Return tokens and targets on the batch's device; targets of padding are `IGNORE`."""


class StreamWindows:
    """Windows of T + 1 tokens that share one token with the next.

    Window i of a part is its tokens[i T : i T + T + 1]; a tail shorter than a window is dropped.
    A batch of windows of any parts is copied by one call.

    Args:
        folder: a prepared folder; raises a `UserError` if damaged.
        split: train, val, or test.
        block_size: T.
    """

    has_padding = False

    def __init__(self, folder: Path, split: str, block_size: int) -> None:
        index = load_index(folder)
        check_sizes(folder, index)
        parts = index.parts(split)
        self.counts = {part: index.windows(name, block_size) for part, name in parts.items()}
        tokens, starts = open_splits(folder, index, [*parts.values()])
        self.first = first_windows(self.counts)
        self.starts = np.array(starts) - self.first * block_size
        self.block_size = block_size
        self.view = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)

    def __getitem__(self, rows: Positions) -> npt.NDArray[Any]:
        """Copy windows `rows`, (N,), into a new array, (N, T + 1); -1 is any window."""
        rows = np.maximum(rows, 0)
        starts = rows * self.block_size
        if len(self.counts) > 1:
            starts += self.starts[np.searchsorted(self.first, rows, "right") - 1]
        picked: npt.NDArray[Any] = self.view[starts]
        return picked

    def gather(self, batches: Sequence[Positions], pinned: bool = False) -> Iterator[Stored]:
        """Copy the windows with these numbers at once and yield each batch, (B, T + 1).

        torch keeps pinned memory until the copy to the GPU is done, then reuses it.
        """
        picked = torch.from_numpy(self[np.concatenate(batches)])
        if pinned:
            picked = picked.pin_memory()
        sizes = [len(rows) for rows in batches]
        for ids, rows in zip(torch.split(picked, sizes), batches, strict=True):
            yield Stored(ids, len(rows) - int(np.count_nonzero(rows < 0)))

    def widen(self, stored: Stored) -> Batch:
        """Return tokens and targets on the batch's device; targets of padding are `IGNORE`."""
        ids = stored.ids
        if ids.is_cpu:  # NumPy needs half of torch's time here
            narrow = ids.numpy()
            tokens = torch.from_numpy(narrow[:, :-1].astype(np.int64))
            targets = torch.from_numpy(narrow[:, 1:].astype(np.int64))
        else:
            tokens = ids[:, :-1].long()  # contiguous copies
            targets = ids[:, 1:].long()
        if stored.real < len(ids):
            tokens[stored.real :] = 0
            targets[stored.real :] = IGNORE
        return tokens, targets


def first_windows(counts: Mapping[str, int]) -> Positions:
    """Return the number of each part's first window, (parts,)."""
    sizes = np.array([*counts.values()], dtype=np.int64)
    return np.cumsum(sizes) - sizes
