"""Token files and their index: `train-00000.bin`, `val-00000.bin`, `index.json` in one folder.

A token file contains only little-endian unsigned integers of the smallest type that fits the
vocabulary (one byte up to 256 tokens, two up to 65,536), so it can be memory-mapped directly.
A large split has several files; all but the last have one size, in whole memory pages.

The index has a SHA-256 of its own values, so a changed byte is found when it is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError
from lockstep.file_systems import lacks_maps, remedy
from lockstep.settings import check_whole
from lockstep.tokens.tokenizer import Tokens
from lockstep.whole_files import replace_text, sync

FORMAT = 2  # increase it with every change that an older reader would misread
INDEX = "index.json"
SEAL = "sha256"  # the key of the hash, the last one in the file
MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap doesn't define it
LIMIT = 256 << 20  # bytes of a token file, unless the source says otherwise


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
    text_bytes: int = 0  # of the documents, for bits per byte; 0 if there is no text
    shards: list[Shard] = field(default_factory=list)


@dataclass(frozen=True)
class Index:
    """The content of a prepared folder's `index.json`."""

    format: int
    dtype: str  # as NumPy writes it, for example "<u2"
    tokenizer: dict[str, Any]
    fingerprint: str  # of the corpus, tokenizer, and settings that decide the tokens
    fingerprints: dict[str, str]  # of each of the three
    settings: dict[str, Any]
    splits: dict[str, Split]
    invalid_documents: int = 0
    position: list[int] = field(default_factory=list)  # in the corpus, of a build that can resume

    @property
    def shards(self) -> list[Shard]:
        """All token files."""
        return [shard for split in self.splits.values() for shard in split.shards]

    def parts(self, split: str) -> dict[str, str]:
        """Return each part of a split, and its entry in `splits`, in the order that numbers them.

        A mixture has an entry such as `code/train` for each source; others are one part, "".
        """
        names = [name for name in self.splits if name.endswith(f"/{split}")]
        return {name.rpartition("/")[0]: name for name in names} or {"": split}

    def test_settings(self) -> str:
        """Name the settings that give the data a split for tests."""
        place = "data.source"
        if "" not in self.parts("train"):
            place += ".sources.NAME"
        return f"{place}.test_fraction or {place}.test_path"

    def windows(self, split: str, block_size: int) -> int:
        """Count the whole windows of `block_size` inputs; two neighbors share one token."""
        return (self.splits[split].tokens - 1) // block_size


def write_index(folder: Path, index: Index) -> None:
    """Write `index.json`; it replaces an older one once it is on disk."""
    write_sealed(folder / INDEX, asdict(index))


def load_index(folder: Path) -> Index:
    """Read `index.json`; raise a `UserError` if it is missing, damaged, or in another format."""
    path = folder / INDEX
    try:
        values = read_sealed(path)
        found = values["format"]
        if found == FORMAT:
            splits = {name: _split_of(entry) for name, entry in values.pop("splits").items()}
            return Index(**values, splits=splits)
    except OSError as error:
        raise unusable(path, f"cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise unusable(path, "is damaged") from error
    raise unusable(path, f"has format {found}, this version reads {FORMAT}")


def _split_of(entry: dict[str, Any]) -> Split:
    """Return a split's entry without values that another version has recorded in addition."""
    known = {item.name: entry[item.name] for item in fields(Split) if item.name in entry}
    return Split(**{**known, "shards": [Shard(**shard) for shard in entry["shards"]]})


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Replace a file with `values` and their SHA-256."""
    replace_text(path, json.dumps({**values, SEAL: _hash_of(values)}, indent=1))


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the values of a file; earlier versions wrote some without a SHA-256.

    Raises:
        OSError: it can't be read.
        ValueError: it isn't a JSON object, or doesn't match its SHA-256.
    """
    try:
        values = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    if SEAL in values and values.pop(SEAL) != _hash_of(values):
        raise ValueError("it does not match its SHA-256")
    return values


def _hash_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def check_sizes(folder: Path, index: Index) -> None:
    """Compare each token file's size with the index; raise a `UserError` if one differs."""
    for shard in index.shards:
        path = folder / shard.file
        expected = shard.tokens * np.dtype(index.dtype).itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise unusable(path, f"cannot be read ({error.strerror})") from error
        if size != expected:
            raise unusable(path, f"has {size:,} bytes, but its index says {expected:,}")


def check_content(folder: Path, index: Index) -> None:
    """Compare each token file with its SHA-256; raise a `UserError` if one differs."""
    check_sizes(folder, index)
    for shard in index.shards:
        path = folder / shard.file
        try:
            is_same = hash_of_file(path) == shard.sha256
        except OSError as error:
            raise unusable(path, f"cannot be read ({error.strerror})") from error
        if not is_same:
            raise unusable(path, "does not match its SHA-256")


def check_block_size(index: Index, block_size: int) -> None:
    """Raise a `UserError` that names the longest context if a split is shorter than a window."""
    check_whole("block_size", block_size, at_least=1)
    for name, split in index.splits.items():
        if index.windows(name, block_size) < 1:
            remedy = "give it more data"
            if split.tokens > 1:
                remedy = f"set at most {split.tokens - 1}, or {remedy}"
            raise UserError(
                f"model.block_size={block_size} needs {block_size + 1:,} tokens, but the {name} "
                f"split has {split.tokens:,}; {remedy}{_size_setting(index, name)}"
            )


def _size_setting(index: Index, split: str) -> str:
    """Return the setting that decides the size of a split, in parentheses; "" if none does."""
    named = index.settings.get("named", {})
    if split in named:
        return f" (data.source.{named[split]})"
    fraction = "test_fraction" if split.endswith("test") else "val_fraction"
    if fraction not in index.settings or (split == "train" and "val" in named):
        return ""
    return f" (data.source.{fraction}={index.settings[fraction]})"


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unusable(path: Path, reason: str) -> UserError:
    """Return the error for a file of a prepared folder, with its reason and remedy."""
    return UserError(f"{path} {reason}; delete the folder {path.parent} and prepare it again")


def open_split(folder: Path, split: str) -> npt.NDArray[Any]:
    """Memory-map one split's tokens read-only, shape (tokens,), or raise a `UserError`."""
    index = load_index(folder)
    check_sizes(folder, index)
    if len(index.splits[split].shards) > 1:
        return open_splits(folder, index, [split])[0]
    path = folder / index.splits[split].shards[0].file
    try:
        return np.memmap(path, index.dtype, mode="r")
    except OSError as error:
        if lacks_maps(error):  # of the kind that others see, too
            return open_splits(folder, index, [split])[0]
        raise unusable(path, f"cannot be mapped ({error.strerror})") from error


def open_splits(
    folder: Path, index: Index, splits: Sequence[str]
) -> tuple[npt.NDArray[Any], list[int]]:
    """Memory-map the tokens of several splits as one array, (tokens,); return where each begins.

    Raises:
        UserError: a file can't be mapped.
    """
    files = [[folder / shard.file for shard in index.splits[name].shards] for name in splits]
    dtype = np.dtype(index.dtype)
    try:
        content, starts = map_files(files)
    except OSError as error:
        path = Path(error.filename)
        reason = f"cannot be mapped ({error.strerror})"
        if lacks_maps(error):
            raise UserError(f"{path} {reason}; {remedy(error, 'data.root')}") from None
        raise unusable(path, reason) from None
    return content.view(dtype), [start // dtype.itemsize for start in starts]


def map_files(groups: Sequence[Sequence[Path]]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Map groups of files into one address range, which is released as a whole.

    Each group begins on a memory page. A group's files but the last consist of whole memory pages,
    so they fit together.

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
    for group, start in zip(groups, bounds, strict=False):
        address = memory.ctypes.data + start
        for path in group:
            size = path.stat().st_size
            with path.open("rb") as file:
                for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):  # some disks lack the first
                    place = (address, size, mmap.PROT_READ, kind | MAP_FIXED, file.fileno(), 0)
                    if system.mmap(*place) == address:
                        break
                    code = ctypes.get_errno()
                else:
                    raise OSError(code, os.strerror(code), str(path))
            address += size
    return memory[: bounds[-2] + sizes[-1]], bounds[:-1]


class SplitWriter:
    """Appends ids to a split's token files in bounded memory, and hashes them.

    It continues where an index ends, cuts off anything after it, and starts a new file at a limit.

    Args:
        folder: where the files are.
        name: name of the split.
        dtype: type of the ids on disk.
        limit: bytes of a file, a multiple of the memory page.
        split: the split as the index has it; None: it has nothing yet.
    """

    def __init__(
        self, folder: Path, name: str, dtype: str, limit: int = LIMIT, split: Split | None = None
    ) -> None:
        split = split or Split()
        self.folder = folder
        self.name = name
        self.dtype = np.dtype(dtype)
        self.limit = limit
        self.tokens = split.tokens
        self.documents = split.documents
        self.text_bytes = split.text_bytes
        files, self._size = divmod(split.tokens * self.dtype.itemsize, limit)
        self.full = split.shards[:files]  # the files that have reached the limit
        self._open(files, "a+b")
        if self._file.seek(0, os.SEEK_END) > self._size:
            self._file.truncate(self._size)
        self._file.seek(0)
        self._hash = hashlib.file_digest(self._file, "sha256")

    def append(self, ids: Tokens, documents: int = 0, text_bytes: int = 0) -> None:
        """Append ids, (tokens,), of `documents` documents with `text_bytes` bytes of text."""
        while ids.size:
            if self._size == self.limit:
                self.full = self.saved().shards
                self.close()
                self._size = 0
                self._open(len(self.full), "wb")
            part, ids = np.split(ids, [(self.limit - self._size) // self.dtype.itemsize])
            self._write(part)
        self.documents += documents
        self.text_bytes += text_bytes

    def _write(self, ids: Tokens) -> None:
        """Append ids that the file has room for."""
        stored = np.ascontiguousarray(ids.astype(self.dtype, casting="safe", copy=False))
        self._file.write(stored.data)
        self._hash.update(stored.data)
        self.tokens += ids.size
        self._size += stored.nbytes

    def _open(self, number: int, mode: str) -> None:
        self._file: Any = (self.folder / f"{self.name}-{number:05}.bin").open(mode)
        self._hash = hashlib.sha256()

    def saved(self) -> Split:
        """Flush everything to disk and return the split's index entry."""
        self._file.flush()
        sync(self._file.fileno())
        shards = [*self.full]
        tokens = self._size // self.dtype.itemsize
        if tokens:
            shards.append(Shard(Path(self._file.name).name, tokens, self._hash.hexdigest()))
        return Split(self.tokens, self.documents, self.text_bytes, shards)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
