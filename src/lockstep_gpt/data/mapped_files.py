"""Maps the token files of a split one after another into what looks like one array.

All files but the last consist of whole memory pages, so they fit together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep_gpt.data.shards import unusable

MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap doesn't define it


def joined(files: list[Path]) -> npt.NDArray[np.uint8]:
    """Map files one after another into one address range, which is released as a whole."""
    sizes = [file.stat().st_size for file in files]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = np.frombuffer(mmap.mmap(-1, sum(sizes), anonymous, mmap.PROT_READ), np.uint8)
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    whole, number = ctypes.c_size_t, ctypes.c_int
    system.mmap.argtypes = [ctypes.c_void_p, whole, number, number, number, ctypes.c_int64]
    address, flags = place.ctypes.data, mmap.MAP_SHARED | MAP_FIXED
    for path, size in zip(files, sizes, strict=True):
        with path.open("rb") as file:
            if system.mmap(address, size, mmap.PROT_READ, flags, file.fileno(), 0) != address:
                raise unusable(path, f"cannot be mapped ({os.strerror(ctypes.get_errno())})")
        address += size
    return place
