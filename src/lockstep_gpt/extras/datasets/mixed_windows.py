"""The windows of all sources as one array: those of the first, then those of the second, ...

Their token files are mapped one after another, each from a memory page on, so that a batch of any
sources is copied by one call, like a batch of a single corpus.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_gpt.data.shards import Index, check_sizes, load_index, unusable

PREFIX = "mixture-"  # of the folders' names
MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap doesn't define it


class MixedWindows:
    """Windows of the sources' tokens, each (T + 1,), mapped, not loaded.

    Args:
        folder: a prepared mixture.
        split: train or val.
        block_size: T.
    """

    def __init__(self, folder: Path, split: str, block_size: int) -> None:
        index = load_index(folder)
        check_sizes(folder, index)
        self.parts = windows_by_source(index, split, block_size)
        self.first = np.array([0, *accumulate(self.parts.values())])[:-1]
        files = [
            [folder / shard.file for shard in index.splits[f"{name}/{split}"].shards]
            for name in self.parts
        ]
        tokens, starts = _mapped(files, np.dtype(index.dtype))
        self.starts = np.array(starts) - self.first * block_size
        self.block_size = block_size
        self.view = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Copy windows `rows`, (N,), into a new array, (N, T + 1); -1 is any window."""
        rows = np.maximum(rows, 0)
        places = np.searchsorted(self.first, rows, "right") - 1
        picked: npt.NDArray[Any] = self.view[self.starts[places] + rows * self.block_size]
        return picked


def opened(folder: Path, split: str, block_size: int) -> MixedWindows | None:
    """Return the windows of a prepared mixture, None of any other folder."""
    return MixedWindows(folder, split, block_size) if folder.name.startswith(PREFIX) else None


def windows_by_source(index: Index, split: str, block_size: int) -> dict[str, int]:
    """Return how many windows of a split each source has, in the order that numbers them."""
    ends = f"/{split}"
    own = [name for name in index.splits if name.endswith(ends)]
    return {name.removesuffix(ends): index.windows(name, block_size) for name in own}


def _mapped(groups: list[list[Path]], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], list[int]]:
    """Map files into one address range; return it, and where each group of files begins.

    A group's files are contiguous, because all but its last consist of whole pages.
    """
    sizes = [sum(path.stat().st_size for path in group) for group in groups]
    page = mmap.PAGESIZE
    bounds = [0, *accumulate(-(-size // page) * page for size in sizes)]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = np.frombuffer(mmap.mmap(-1, bounds[-1], anonymous, mmap.PROT_READ), np.uint8)
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    whole, number = ctypes.c_size_t, ctypes.c_int
    system.mmap.argtypes = [ctypes.c_void_p, whole, number, number, number, ctypes.c_int64]
    for group, start in zip(groups, bounds, strict=False):
        address = place.ctypes.data + start
        for path in group:
            size = path.stat().st_size
            with path.open("rb") as file:
                flags = mmap.MAP_SHARED | MAP_FIXED
                if system.mmap(address, size, mmap.PROT_READ, flags, file.fileno(), 0) != address:
                    raise unusable(path, f"cannot be mapped ({os.strerror(ctypes.get_errno())})")
            address += size
    return place.view(dtype), [start // dtype.itemsize for start in bounds[:-1]]
