"""Token files, their index and their windows: `train.bin`, `val.bin`, `index.json` in one folder.

A token file holds little-endian unsigned integers of the smallest type that fits the vocabulary
(one byte up to 256 tokens, two up to 65,536) and nothing else, so it is memory-mapped as it lies.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import UserError
from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.tokenizer import Tokens, token_dtype

if TYPE_CHECKING:  # the parent of a run reads an index, and never imports torch
    from torch import Tensor

Batch: TypeAlias = "tuple[Tensor, Tensor]"

FORMAT = 1  # a new number for every change that an older reader would misread
INDEX = "index.json"


@dataclass(frozen=True)
class Split:
    """One token file."""

    file: str
    tokens: int
    documents: int
    text_bytes: int  # of the documents, for bits per byte; 0 where there is no text
    sha256: str


@dataclass(frozen=True)
class Index:
    """What `index.json` says about a prepared folder."""

    format: int
    dtype: str  # as NumPy writes it, for example "<u2"
    tokenizer: dict[str, Any]
    fingerprint: str  # of the corpus, the tokenizer and the settings that decide the tokens
    settings: dict[str, Any]
    skipped_documents: int
    splits: dict[str, Split]

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.tokenizer["vocab_size"])

    def windows(self, split: str, block_size: int) -> int:
        """Count the whole windows of `block_size` inputs, each with a target one further.

        Windows share only the token between them; a tail shorter than one window is dropped.
        """
        return (self.splits[split].tokens - 1) // block_size


class TokenWriter:
    """Appends ids to one token file in bounded memory and hashes them on the way."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path = path
        self.dtype = token_dtype(vocab_size).newbyteorder("<")
        self.tokens = self.documents = self.text_bytes = 0
        self._hash = hashlib.sha256()
        self._file = path.open("xb", buffering=1 << 20)

    def append(self, ids: Tokens) -> None:
        """Append ids of shape (tokens,)."""
        assert np.can_cast(ids.dtype, self.dtype), (ids.dtype, self.dtype)
        data = np.ascontiguousarray(ids, dtype=self.dtype).data
        self._file.write(data)
        self._hash.update(data)
        self.tokens += ids.size

    def append_document(self, ids: Tokens, end_of_text: Tokens, text_bytes: int) -> None:
        """Append one document's ids and what ends it."""
        self.append(ids)
        self.append(end_of_text)
        self.documents += 1
        self.text_bytes += text_bytes

    def close(self) -> None:
        """Close the file once its bytes are on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def split(self) -> Split:
        """Return the index's entry for what was written."""
        counts = (self.tokens, self.documents, self.text_bytes)
        return Split(self.path.name, *counts, self._hash.hexdigest())


def write_index(folder: Path, index: Index) -> None:
    """Write `index.json` and see it to the disk."""
    with (folder / INDEX).open("x", encoding="utf-8") as file:
        json.dump(asdict(index), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def load_index(folder: Path) -> Index:
    """Read `index.json`.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    path = folder / INDEX
    try:
        values = json.loads(path.read_bytes())
        if values["format"] == FORMAT:
            splits = {name: Split(**split) for name, split in values.pop("splits").items()}
            return Index(**values, splits=splits)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unusable(path, "is damaged") from error
    raise _unusable(path, f"has format {values['format']}, this version reads {FORMAT}")


def check_sizes(folder: Path, index: Index) -> None:
    """Compare each token file's size with the index.

    Raises:
        UserError: a file is missing, truncated or has grown.
    """
    for split in index.splits.values():
        path = folder / split.file
        expected = split.tokens * np.dtype(index.dtype).itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unusable(path, f"cannot be read ({error.strerror})") from error
        if size != expected:
            raise _unusable(path, f"holds {size:,} bytes where its index says {expected:,}")


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(f"{path} {reason}; delete the folder {path.parent} and prepare it again")


def open_split(folder: Path, split: str) -> np.memmap[Any, Any]:
    """Map one split's ids read-only, shape (tokens,).

    Raises:
        UserError: the folder is not what its index says.
    """
    index = load_index(folder)
    check_sizes(folder, index)
    return np.memmap(folder / index.splits[split].file, dtype=index.dtype, mode="r")


def open_windows(folder: Path, split: str, block_size: int) -> npt.NDArray[Any]:
    """Return a view of the whole windows, shape (windows, T + 1), mapped and not in memory.

    Window i is tokens[i T : i T + T + 1]; the tail shorter than a window is dropped.
    """
    tokens = np.asarray(open_split(folder, split))
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[::block_size]


def gather(windows: npt.NDArray[Any], rows: Positions) -> Batch:
    """Copy the windows `rows` (B,) into `(tokens, targets)`, each (B, T) and int64.

    A row of -1 is padding: its tokens are 0, its targets `IGNORE`.
    """
    import torch

    from lockstep_gpt.model.functional import IGNORE

    picked = windows[rows]  # (B, T + 1)
    tokens, targets = picked[:, :-1].astype(np.int64), picked[:, 1:].astype(np.int64)
    tokens[rows < 0] = 0
    targets[rows < 0] = IGNORE
    return torch.from_numpy(tokens), torch.from_numpy(targets)


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
