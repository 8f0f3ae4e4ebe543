"""Windows of a split's tokens: each is a sample, numbered from 0, that batches are made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.functional import IGNORE
from lockstep.loading.order import Positions, spread
from lockstep.tokens.shards import check_sizes, load_index, open_splits

Batch = tuple[Tensor, Tensor]  # tokens and targets, each (B, T) and int64


class Stored(NamedTuple):
    """A batch as it travels to a device."""

    ids: Tensor  # in their narrow stored type; only the windows know the shape
    real: Any  # what the windows need to know to tell padding from tokens


class Windows(Protocol):
    """The windows of one split of a prepared folder, mapped, not loaded: a map-style dataset."""

    counts: dict[str, int]  # windows of each part of the corpus, in the order that numbers them
    has_padding: bool  # whether a window of training may have targets that don't count

    def __len__(self) -> int:
        """Return the number of windows."""

    def __getitems__(self, rows: Sequence[int]) -> Sequence[Any] | Tensor:
        """Copy the windows with these numbers, (N,)."""

    def collate(self, windows: Any) -> Stored:
        """Make a batch of what `__getitems__` returned, or of a slice of it."""

    def pad(self, stored: Stored, real: int) -> Stored:
        """Return a batch in which rows from `real` on have no targets that count."""

    def widen(self, stored: Stored) -> Batch:
        """Return tokens and targets on the batch's device; targets of padding are `IGNORE`."""


class StreamWindows(Dataset[Any]):
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

    def __len__(self) -> int:
        """Return the number of windows."""
        return sum(self.counts.values())

    def __getitem__(self, numbers: npt.ArrayLike) -> npt.NDArray[Any]:
        """Copy the windows with these numbers, (N,), into a new array, (N, T + 1)."""
        rows = np.asarray(numbers, np.int64)
        starts = rows * self.block_size
        if len(self.counts) > 1:
            starts += self.starts[np.searchsorted(self.first, rows, "right") - 1]
        picked: npt.NDArray[Any] = self.view[starts]
        return picked

    def __getitems__(self, rows: Sequence[int]) -> Tensor:
        """Copy the windows with these numbers, (N, T + 1), in their stored type."""
        return torch.from_numpy(self[rows])

    def collate(self, windows: Tensor) -> Stored:
        """Make a batch of windows, (B, T + 1)."""
        return Stored(windows, len(windows))

    def pad(self, stored: Stored, real: int) -> Stored:
        """Return a batch in which rows from `real` on have no targets that count."""
        return Stored(stored.ids, real)

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


class SpreadWindows(Dataset[Any]):
    """Some windows of one part of a corpus, spread evenly over it.

    Args:
        windows: of all parts.
        first: number of the part's first window.
        size: windows of the part.
        count: how many of them to have.
    """

    def __init__(self, windows: Windows, first: int, size: int, count: int) -> None:
        self.windows = windows
        self.first = first
        self.size = size
        self.count = count

    def __len__(self) -> int:
        """Return how many windows there are."""
        return self.count

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Copy the windows with these numbers."""
        places = spread(np.asarray(rows, np.int64), self.size, self.count)
        return self.windows.__getitems__((self.first + places).tolist())


def read_windows(windows: Windows, rows: Sequence[int]) -> Batch:
    """Return the tokens and targets of the windows with these numbers, each (N, T)."""
    return windows.widen(windows.collate(windows.__getitems__(rows)))


def move_to_device(stored: Stored, device: torch.device) -> Stored:
    """Return a batch on a device; a copy from page-locked memory to a GPU is not awaited."""
    ids = stored.ids
    real = stored.real
    if ids.device == device:
        return stored
    if device.type == "mps":
        ids = ids.int()  # MPS lacks uint16
    continues = device.type == "cuda"  # the host, during the copy
    if isinstance(real, Tensor):
        real = real.to(device, non_blocking=continues)
    return Stored(ids.to(device, non_blocking=continues), real)


def first_windows(counts: Mapping[str, int]) -> Positions:
    """Return the number of each part's first window, (parts,)."""
    sizes = np.array([*counts.values()], dtype=np.int64)
    return np.cumsum(sizes) - sizes
