"""Windows of a split's tokens, and the batches made from them."""

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
from lockstep_gpt.registry import asked

Stored = tuple[Tensor, int]  # windows (B, T + 1) in their narrow stored type, and how many are real
Batch = tuple[Tensor, Tensor]  # tokens and targets, each (B, T) and int64


def open_windows(folder: Path, split: str, block_size: int) -> Any:
    """Return a view of the whole windows, shape (windows, T + 1), mapped, not loaded.

    Window i is tokens[i T : i T + T + 1]; a tail shorter than a window is dropped.
    """
    for mixed in filter(None, asked("WINDOWS", folder, split, block_size)):
        return mixed
    tokens = np.asarray(open_split(folder, split))
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[::block_size]


def gather(
    windows: npt.NDArray[Any], batches: Sequence[Positions], pinned: bool = False
) -> Iterator[Stored]:
    """Copy the windows of several batches at once and yield each batch.

    The windows of a split are (windows, T + 1). Each batch is (B,) indices of them; -1 at its end
    is padding. A GPU copies from `pinned` memory while the host continues. torch keeps that memory
    until the copy is done, then reuses it.
    """
    picked = torch.from_numpy(windows[np.concatenate(batches)])
    if pinned:
        picked = picked.pin_memory()
    for part, rows in zip(torch.split(picked, [*map(len, batches)]), batches, strict=True):
        yield part, len(rows) - int(np.count_nonzero(rows < 0))


def widen(stored: Stored) -> Batch:
    """Return tokens and targets on the windows' device; targets of padding are `IGNORE`."""
    windows, real = stored
    if windows.is_cpu:  # NumPy needs half of torch's time here
        narrow = windows.numpy()
        wide = narrow[:, :-1].astype(np.int64), narrow[:, 1:].astype(np.int64)
        tokens, targets = map(torch.from_numpy, wide)
    else:
        tokens, targets = windows[:, :-1].long(), windows[:, 1:].long()  # contiguous copies
    if real < len(windows):
        tokens[real:] = 0
        targets[real:] = IGNORE
    return tokens, targets
