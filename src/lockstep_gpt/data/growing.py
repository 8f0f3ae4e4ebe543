"""Copies the tokens of documents that an earlier state of a corpus has, and tokenizes the others.

Next to its token files, a prepared folder has a hash of each document's text. A build looks up its
documents in the newest folder with the same tokenizer, and copies their tokens. The result is bit
for bit that of a build from nothing, and the earlier folder stays as it is.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep_gpt.data import shards
from lockstep_gpt.data.shards import HASH, Index, hashes_of
from lockstep_gpt.data.sources.source import SPLITS
from lockstep_gpt.data.tokenizer import Tokenizer, Tokens
from lockstep_gpt.errors import UserError

logger = logging.getLogger(__name__)

PIECE = 1 << 20  # tokens that are searched at once
# The files that `remember` writes.
KEYS = "keys.npy"
PLACES = "places.npy"
FOLDER = "folder"


class HashWriter:
    """Appends documents' hashes to the files of a folder, from where its index ends."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._sums: dict[str, Any] = {}
        for name, split in index.splits.items():
            if hashes_of(folder, name).exists():
                self._open(name).truncate(split.documents * HASH)
                self._files[name].seek(0)
                self._sums[name] = hashlib.file_digest(self._files[name], "sha256")

    def append(self, split: str, hashes: bytes) -> None:
        """Append the hashes of documents, if there are any: tokens without documents have none."""
        if not hashes:
            return
        if split not in self._files:
            self._open(split)
        self._files[split].write(hashes)
        self._sums[split].update(hashes)

    def _open(self, split: str) -> Any:
        self._files[split] = hashes_of(self.folder, split).open("a+b")
        self._sums[split] = hashlib.sha256()
        return self._files[split]

    def saved(self, split: str) -> str:
        """Flush everything to disk and return the SHA-256 of a split's file; "" if it has none."""
        if split not in self._files:
            return ""
        self._files[split].flush()
        os.fsync(self._files[split].fileno())
        digest: str = self._sums[split].hexdigest()
        return digest

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def earlier_state(root: Path, source: str, index: Index) -> Path | None:
    """Return the newest prepared folder of a source whose tokens `index`'s tokenizer made.

    Its files match their SHA-256: a new folder would give a damaged copy a SHA-256 that fits.
    """
    folders = [
        path for path in root.glob(f"{source}-????????") if hashes_of(path, "train").exists()
    ]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            other = shards.load_index(folder)
            if other.tokenizer == index.tokenizer:
                shards.check_content(folder, other)
                return folder
        except UserError as error:
            logger.warning("%s; its tokens are not copied", error)
    return None


def remember(folder: Path, end_of_text: int, place: Path) -> bool:
    """Write to `place` where the tokens of each document of `folder` are, sorted by hash.

    Return whether the folder's tokens have as many ends as it has documents.
    """
    keys = []
    places = []
    before = 0  # tokens of the splits before
    for split in SPLITS:
        if not hashes_of(folder, split).exists():
            continue
        hashes = np.fromfile(hashes_of(folder, split), "<u8").reshape(-1, HASH // 8)
        ends, count = _ends(folder, split, end_of_text)
        if len(ends) != len(hashes):
            return False
        starts = np.concatenate([[0], ends[:-1]])
        keys.append(hashes)
        places.append(np.stack([starts + before, ends + before], 1))
        before += count
    joined = np.concatenate(keys)
    order = np.argsort(joined[:, 0], kind="stable")
    place.mkdir()
    np.save(place / KEYS, np.ascontiguousarray(joined[order].T))  # each half is contiguous
    np.save(place / PLACES, np.concatenate(places)[order])
    (place / FOLDER).write_text(str(folder.absolute()))
    return True


def _ends(folder: Path, split: str, end_of_text: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return where the documents of a split end, and how many tokens it has; read in pieces."""
    index = shards.load_index(folder)
    ends = [np.empty(0, np.int64)]
    count = 0
    for shard in index.splits[split].shards:
        with (folder / shard.file).open("rb") as file:
            piece = np.fromfile(file, index.dtype, PIECE)
            while piece.size:
                ends.append(np.flatnonzero(piece == end_of_text) + count + 1)
                count += piece.size
                piece = np.fromfile(file, index.dtype, PIECE)
    return np.concatenate(ends), count


class Tokenized(NamedTuple):
    """Encoded documents: their ids, their hashes, and how many weren't tokenized again."""

    ids: Tokens
    hashes: bytes
    known: int


class Encoder:
    """Encodes documents; copies the tokens of those that are known.

    Args:
        tokenizer: for the others.
        place: what `remember` wrote, or nothing yet.
    """

    def __init__(self, tokenizer: Tokenizer, place: Path) -> None:
        self.tokenizer = tokenizer
        self.keys: npt.NDArray[np.uint64] | None = None
        if place.exists():
            folder = Path((place / FOLDER).read_text())
            self.keys = np.load(place / KEYS, mmap_mode="r")
            self.places = np.load(place / PLACES, mmap_mode="r")
            present = [split for split in SPLITS if hashes_of(folder, split).exists()]
            self.tokens = [shards.open_split(folder, split) for split in present]

    def encode(self, texts: Sequence[bytes]) -> Tokenized:
        """Return the ids of valid texts one after another, each followed by the end of text."""
        hashes = b"".join(hashlib.blake2b(text, digest_size=HASH).digest() for text in texts)
        if self.keys is None:
            return Tokenized(self.tokenizer.encode_documents(texts), hashes, 0)
        wanted = np.frombuffer(hashes, "<u8").reshape(-1, HASH // 8).T
        rows = np.minimum(np.searchsorted(self.keys[0], wanted[0]), self.keys.shape[1] - 1)
        known = (self.keys[:, rows] == wanted).all(axis=0)
        if not known.any():
            return Tokenized(self.tokenizer.encode_documents(texts), hashes, 0)
        new = [text for text, is_known in zip(texts, known, strict=True) if not is_known]
        tokens_of_new = iter(self._encode_apart(new))
        parts = []
        for row, is_known in zip(rows, known, strict=True):
            if is_known:
                parts.append(self._copy_tokens(*self.places[row]))
            else:
                parts.append(next(tokens_of_new))
        return Tokenized(np.concatenate(parts), hashes, int(known.sum()))

    def _encode_apart(self, texts: Sequence[bytes]) -> Sequence[Tokens]:
        if not texts:
            return []
        ids = self.tokenizer.encode_documents(texts)
        return np.split(ids, np.flatnonzero(ids == self.tokenizer.end_of_text)[:-1] + 1)

    def _copy_tokens(self, start: int, end: int) -> Tokens:
        for tokens in self.tokens:
            if start < len(tokens):
                return tokens[start:end]
            start -= len(tokens)
            end -= len(tokens)
        raise AssertionError("every place is in one of the splits")
