"""Token files and their index: `train-00000.bin`, `val-00000.bin`, ..., `index.json` in one folder.

A token file holds little-endian unsigned integers of the smallest type that fits the vocabulary
(one byte up to 256 tokens, two up to 65,536) and nothing else, so it is memory-mapped as it lies.
All files of a split but its last are equally large, whole pages of memory, so that they map one
after another into what looks like one array.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import UserError
from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.tokenizer import Tokens

if TYPE_CHECKING:  # the parent of a run reads an index, and never imports torch
    from torch import Tensor

# Windows (B, T + 1) as narrow as on the disk, and how many are real; tokens and targets, each
# (B, T) and int64.
Stored: TypeAlias = "tuple[Tensor, int]"
Batch: TypeAlias = "tuple[Tensor, Tensor]"

FORMAT = 2  # a new number for every change that an older reader would misread
INDEX = "index.json"
MAP_FIXED = 0x10  # of Linux and macOS, which Python's mmap does not name


@dataclass(frozen=True)
class Shard:
    """One token file."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """The token files of one split."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0  # of the documents, for bits per byte; 0 where there is no text
    shards: list[Shard] = field(default_factory=list)


@dataclass(frozen=True)
class Index:
    """What `index.json` says about a prepared folder, or about one that is being prepared."""

    format: int
    dtype: str  # as NumPy writes it, for example "<u2"
    tokenizer: dict[str, Any]
    fingerprint: str  # of the corpus, the tokenizer and the settings that decide the tokens
    fingerprints: dict[str, str]  # of each of the three
    settings: dict[str, Any]
    position: list[int]  # in the corpus, where the next block begins
    invalid_documents: int
    splits: dict[str, Split]

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.tokenizer["vocab_size"])

    @property
    def shards(self) -> list[Shard]:
        """All token files."""
        return [shard for split in self.splits.values() for shard in split.shards]

    def windows(self, split: str, block_size: int) -> int:
        """Count the whole windows of `block_size` inputs, each with a target one further.

        Windows share only the token between them; a tail shorter than one window is dropped.
        """
        return (self.splits[split].tokens - 1) // block_size


class SplitWriter:
    """Appends ids to the token files of one split in bounded memory and hashes them on the way.

    Args:
        folder: where the files are.
        name: the split's.
        dtype: of the ids on the disk.
        limit: bytes of a file, whole pages of memory.
        split: what is there already; anything behind it is cut off.
    """

    def __init__(self, folder: Path, name: str, dtype: str, limit: int, split: Split) -> None:
        self.folder, self.name, self.dtype, self.limit = folder, name, np.dtype(dtype), limit
        self.tokens, self.documents = split.tokens, split.documents
        self.text_bytes = split.text_bytes
        files, rest = divmod(split.tokens * self.dtype.itemsize, limit)
        self.full = split.shards[:files]
        self._begin(rest)

    def _begin(self, size: int) -> None:
        self._size = size
        self._file = (self.folder / f"{self.name}-{len(self.full):05}.bin").open("a+b")
        self._file.truncate(size)
        self._file.seek(0)
        self._hash = hashlib.file_digest(self._file, "sha256")

    def append(self, ids: Tokens, documents: int = 0, text_bytes: int = 0) -> None:
        """Append ids of shape (tokens,): so many documents, of so many bytes of text."""
        stored = np.ascontiguousarray(ids.astype(self.dtype, casting="safe", copy=False))
        data = stored.view(np.uint8).data
        while data:
            if self._size == self.limit:
                self.full.append(self._shard())
                self.close()
                self._begin(0)
            part = data[: self.limit - self._size]
            self._file.write(part)
            self._hash.update(part)
            self._size, data = self._size + len(part), data[len(part) :]
        self.tokens += ids.size
        self.documents += documents
        self.text_bytes += text_bytes

    def _shard(self) -> Shard:
        """See the last file to the disk and describe it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        name = Path(self._file.name).name
        return Shard(name, self._size // self.dtype.itemsize, self._hash.hexdigest())

    def saved(self) -> Split:
        """See everything to the disk and return the index's entry for it."""
        counts = self.tokens, self.documents, self.text_bytes
        return Split(*counts, [*self.full, *([self._shard()] if self._size else [])])

    def close(self) -> None:
        """Close the last file."""
        self._file.close()


def write_index(folder: Path, index: Index) -> None:
    """Put `index.json` in the place of an older one, once it is on the disk."""
    beside = folder / f".{INDEX}"
    with beside.open("w", encoding="utf-8") as file:
        json.dump(asdict(index), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / INDEX)


def load_index(folder: Path) -> Index:
    """Read `index.json`.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    path = folder / INDEX
    try:
        values = json.loads(path.read_bytes())
        if values["format"] == FORMAT:
            splits = {name: _split(**split) for name, split in values.pop("splits").items()}
            return Index(**values, splits=splits)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unusable(path, "is damaged") from error
    raise _unusable(path, f"has format {values['format']}, this version reads {FORMAT}")


def _split(shards: list[dict[str, Any]], **counts: int) -> Split:
    return Split(**counts, shards=[Shard(**shard) for shard in shards])


def check_sizes(folder: Path, index: Index) -> None:
    """Compare each token file's size with the index.

    Raises:
        UserError: a file is missing, truncated or has grown.
    """
    for shard in index.shards:
        path = folder / shard.file
        expected = shard.tokens * np.dtype(index.dtype).itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unusable(path, f"cannot be read ({error.strerror})") from error
        if size != expected:
            raise _unusable(path, f"holds {size:,} bytes where its index says {expected:,}")


def cut_to_index(folder: Path, index: Index) -> None:
    """Cut off what a killed build wrote after its index."""
    for shard in index.shards:
        size = shard.tokens * np.dtype(index.dtype).itemsize
        with contextlib.suppress(OSError):  # a missing file is for `check_sizes` to tell
            if (folder / shard.file).stat().st_size > size:
                os.truncate(folder / shard.file, size)


def check_content(folder: Path, index: Index) -> None:
    """Compare each token file with its SHA-256.

    Raises:
        UserError: one is not what was written.
    """
    check_sizes(folder, index)
    for shard in index.shards:
        with (folder / shard.file).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise _unusable(folder / shard.file, "is not what its SHA-256 says")


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(f"{path} {reason}; delete the folder {path.parent} and prepare it again")


def open_split(folder: Path, split: str) -> npt.NDArray[Any]:
    """Map one split's ids read-only, shape (tokens,), whatever the number of its files.

    Raises:
        UserError: the folder is not what its index says.
    """
    index = load_index(folder)
    check_sizes(folder, index)
    files = [folder / shard.file for shard in index.splits[split].shards]
    if len(files) == 1:
        return np.memmap(files[0], index.dtype, mode="r")
    return _joined(files).view(index.dtype)


def _joined(files: list[Path]) -> npt.NDArray[np.uint8]:
    """Map files one after another into one range of addresses, which is given back as a whole."""
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
                raise _unusable(path, f"cannot be mapped ({os.strerror(ctypes.get_errno())})")
        address += size
    return place


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

    Args:
        windows: all of a split, shape (windows, T + 1).
        batches: which of them, each (B,); -1, which comes last, is padding.
        pinned: into memory that a GPU copies from while the host goes on. torch keeps such memory
            until the copy is done, and then uses it again.
    """
    import torch

    picked = torch.from_numpy(windows[np.concatenate(batches)])
    if pinned:
        picked = picked.pin_memory()
    for part, rows in zip(torch.split(picked, [*map(len, batches)]), batches, strict=True):
        yield part, len(rows) - int(np.count_nonzero(rows < 0))


def widen(stored: Stored) -> Batch:
    """Return tokens and targets on the device that the windows are on; padding counts nowhere."""
    import torch

    from lockstep_gpt.model.functional import IGNORE

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


def check_block_size(index: Index, block_size: int) -> None:
    """Refuse a context that leaves a split without one whole window.

    Raises:
        UserError: with the longest `model.block_size` that fits.
    """
    for name, split in index.splits.items():
        if index.windows(name, block_size) < 1:
            raise UserError(
                f"model.block_size={block_size} needs {block_size + 1:,} tokens in a row and the "
                f"{name} split has {split.tokens:,}; set model.block_size to at most "
                f"{split.tokens - 1} or give the split more data (data.val_fraction="
                f"{index.settings['val_fraction']})"
            )
