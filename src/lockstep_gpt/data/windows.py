"""Windows of a split's tokens, and the batches that are made of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.shards import open_split
from lockstep_gpt.model.functional import IGNORE

Stored = tuple[Tensor, int]  # windows (B, T + 1) as narrow as on the disk, and how many are real
Batch = tuple[Tensor, Tensor]  # tokens and targets, each (B, T) and int64


def open_windows(folder: Path, split: str, block_size: int) -> npt.NDArray[Any]:
    """Return a view of the whole windows, shape (windows, T + 1), mapped and not in memory.

    Window i is tokens[i T : i T + T + 1]; the tail shorter than a window is dropped.
    """
    tokens = np.asarray(open_split(folder, split))
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[::block_size]


def gather(
    windows: npt.NDArray[Any], batches: Sequence[Positions], pinned: bool = False
) -> Iterator[Stored]:
    """Copy the windows of several batches at once and yield each batch.

    The windows of a split are (windows, T + 1); each batch is (B,) of them, -1 at its end being
    padding. From `pinned` memory a GPU copies while the host goes on: torch keeps such memory
    until the copy is done, and then uses it again.
    """
    picked = torch.from_numpy(windows[np.concatenate(batches)])
    if pinned:
        picked = picked.pin_memory()
    for part, rows in zip(torch.split(picked, [*map(len, batches)]), batches, strict=True):
        yield part, len(rows) - int(np.count_nonzero(rows < 0))


def widen(stored: Stored) -> Batch:
    """Return tokens and targets on the device that the windows are on; padding counts nowhere."""
    windows, real = stored
    if windows.is_cpu:  # NumPy takes half of torch's time for it
        narrow = windows.numpy()
        wide = narrow[:, :-1].astype(np.int64), narrow[:, 1:].astype(np.int64)
        tokens, targets = map(torch.from_numpy, wide)
    else:
        tokens, targets = windows[:, :-1].long(), windows[:, 1:].long()  # contiguous copies
    if real < len(windows):
        tokens[real:] = 0
        targets[real:] = IGNORE
    return tokens, targets
