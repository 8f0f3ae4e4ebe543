"""Maps groups of files one after another into what looks like one array of bytes.

Each group begins on a memory page. A group's files but the last consist of whole memory pages, so
they fit together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap doesn't define it


def map_files(groups: Sequence[Sequence[Path]]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Map files into one address range, which is released as a whole.

    Returns the bytes, to the end of the last group, and where each group begins in them.

    Raises:
        OSError: a file can't be mapped; its `filename` says which.
    """
    sizes = [sum(path.stat().st_size for path in group) for group in groups]
    page = mmap.PAGESIZE
    bounds = [0, *accumulate(-(-size // page) * page for size in sizes)]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, bounds[-1], anonymous, mmap.PROT_READ), np.uint8)
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    integer = ctypes.c_int
    system.mmap.argtypes = [
        ctypes.c_void_p,  # address
        ctypes.c_size_t,  # length
        integer,  # protection
        integer,  # flags
        integer,  # file descriptor
        ctypes.c_int64,  # offset
    ]
    flags = mmap.MAP_SHARED | MAP_FIXED
    for group, start in zip(groups, bounds, strict=False):
        address = memory.ctypes.data + start
        for path in group:
            size = path.stat().st_size
            with path.open("rb") as file:
                if system.mmap(address, size, mmap.PROT_READ, flags, file.fileno(), 0) != address:
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code), str(path))
            address += size
    return memory[: bounds[-2] + sizes[-1]], bounds[:-1]
