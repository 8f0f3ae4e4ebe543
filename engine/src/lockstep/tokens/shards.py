"""Token files and their index: `train-00000.bin`, `val-00000.bin`, `index.json` in one folder.

A token file contains only little-endian unsigned integers of the smallest type that fits the
vocabulary (one byte up to 256 tokens, two up to 65,536), so it can be memory-mapped directly.
A large split has several files; all but the last have one size, in whole memory pages.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError
from lockstep.settings import check_whole
from lockstep.tokens.mapped_files import map_files
from lockstep.tokens.sealed_json import hash_of_file, read_sealed, write_sealed

FORMAT = 2  # increase it with every change that an older reader would misread
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
        reason = f"cannot be mapped ({error.strerror})"
        raise unusable(Path(error.filename), reason) from None
    return content.view(dtype), [start // dtype.itemsize for start in starts]


def check_block_size(index: Index, block_size: int) -> None:
    """Raise a `UserError` that names the longest context if a split is shorter than a window."""
    check_whole("block_size", block_size, at_least=1)
    for name, split in index.splits.items():
        if index.windows(name, block_size) < 1:
            fraction = "test_fraction" if name.endswith("test") else "val_fraction"
            hint = ""
            if fraction in index.settings:
                hint = f" (data.source.{fraction}={index.settings[fraction]})"
            raise UserError(
                f"model.block_size={block_size} needs {block_size + 1:,} tokens, but the {name} "
                f"split has {split.tokens:,}; set at most {split.tokens - 1}, or give it more data"
                f"{hint}"
            )
