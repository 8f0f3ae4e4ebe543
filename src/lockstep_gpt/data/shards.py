"""Token files and their index: `train-00000.bin`, `val-00000.bin`, ..., `index.json` in one folder.

A token file holds little-endian unsigned integers of the smallest type that fits the vocabulary
(one byte up to 256 tokens, two up to 65,536) and nothing else, so it is memory-mapped as it lies.
All files of a split but its last are equally large, whole pages of memory.
"""

from __future__ import annotations

import hashlib
import json
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
from lockstep_gpt.registry import addition
from lockstep_gpt.whole_files import replace_text

if TYPE_CHECKING:  # the parent of a run reads an index, and never imports torch
    from torch import Tensor

# Windows (B, T + 1) as narrow as on the disk, and how many are real; tokens and targets, each
# (B, T) and int64.
Stored: TypeAlias = "tuple[Tensor, int]"
Batch: TypeAlias = "tuple[Tensor, Tensor]"

FORMAT = 2  # a new number for every change that an older reader would misread
INDEX = "index.json"


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
    """What `index.json` says about a prepared folder."""

    format: int
    dtype: str  # as NumPy writes it, for example "<u2"
    tokenizer: dict[str, Any]
    fingerprint: str  # of the corpus, the tokenizer and the settings that decide the tokens
    fingerprints: dict[str, str]  # of each of the three
    settings: dict[str, Any]
    splits: dict[str, Split]
    invalid_documents: int = 0
    position: list[int] = field(default_factory=list)  # in the corpus, of a build that can go on

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
    """

    def __init__(self, folder: Path, name: str, dtype: str, limit: int) -> None:
        self.folder, self.name, self.dtype, self.limit = folder, name, np.dtype(dtype), limit
        self.tokens = self.documents = self.text_bytes = 0
        self.full: list[Shard] = []
        self._begin()

    def _begin(self, mode: str = "wb") -> None:
        self._size, self._hash = 0, hashlib.sha256()
        self._file: Any = (self.folder / f"{self.name}-{len(self.full):05}.bin").open(mode)

    def append(self, ids: Tokens, documents: int = 0, text_bytes: int = 0) -> None:
        """Append ids of shape (tokens,): so many documents, of so many bytes of text."""
        stored = np.ascontiguousarray(ids.astype(self.dtype, casting="safe", copy=False))
        data = stored.view(np.uint8).data
        while data:
            if self._size == self.limit:
                self.full.append(self._shard())
                self.close()
                self._begin()
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
    replace_text(folder / INDEX, json.dumps(asdict(index), indent=1))


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
        raise unusable(path, f"cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise unusable(path, "is damaged") from error
    raise unusable(path, f"has format {values['format']}, this version reads {FORMAT}")


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
            raise unusable(path, f"cannot be read ({error.strerror})") from error
        if size != expected:
            raise unusable(path, f"holds {size:,} bytes where its index says {expected:,}")


def check_content(folder: Path, index: Index) -> None:
    """Compare each token file with its SHA-256.

    Raises:
        UserError: one is not what was written.
    """
    check_sizes(folder, index)
    for shard in index.shards:
        with (folder / shard.file).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise unusable(folder / shard.file, "is not what its SHA-256 says")


def unusable(path: Path, reason: str) -> UserError:
    """Return the error that says what is wrong with a file of a prepared folder."""
    return UserError(f"{path} {reason}; delete the folder {path.parent} and prepare it again")


def open_split(folder: Path, split: str) -> list[npt.NDArray[Any]]:
    """Map one split's token files read-only, each of shape (tokens,).

    Raises:
        UserError: the folder is not what its index says.
    """
    index = load_index(folder)
    check_sizes(folder, index)
    files = [folder / shard.file for shard in index.splits[split].shards]
    if len(files) > 1 and (joined := addition("JOINED_FILES")):
        return [joined(files).view(index.dtype)]
    return [np.memmap(file, index.dtype, mode="r") for file in files]


@dataclass(frozen=True)
class WindowsOfFiles:
    """The windows of a split of several files, indexed like those of one."""

    files: list[npt.NDArray[Any]]
    block_size: int

    def __getitem__(self, rows: Positions) -> npt.NDArray[Any]:
        """Return copies, shape (rows, T + 1); any window stands for -1, which is padding."""
        return np.stack([self._window(max(0, int(row)) * self.block_size) for row in rows])

    def _window(self, start: int) -> npt.NDArray[Any]:
        size, end = len(self.files[0]), start + self.block_size + 1
        parts = [
            self.files[file][max(0, start - file * size) : end - file * size]
            for file in range(start // size, (end - 1) // size + 1)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


Windows: TypeAlias = "npt.NDArray[Any] | WindowsOfFiles"


def open_windows(folder: Path, split: str, block_size: int) -> Windows:
    """Return a view of the whole windows, shape (windows, T + 1), mapped and not in memory.

    Window i is tokens[i T : i T + T + 1]; the tail shorter than a window is dropped.
    """
    files = open_split(folder, split)
    if len(files) > 1:
        return WindowsOfFiles(files, block_size)
    tokens = np.asarray(files[0])
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[::block_size]


def gather(
    windows: Windows, batches: Sequence[Positions], pinned: bool = False
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
