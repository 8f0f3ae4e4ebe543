"""Writes the token files of one split, from where an index ends."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.tokens.shards import Shard, Split
from lockstep.tokens.tokenizer import Tokens

LIMIT = 256 << 20  # bytes of a token file, unless the source says otherwise


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
        os.fsync(self._file.fileno())
        shards = [*self.full]
        tokens = self._size // self.dtype.itemsize
        if tokens:
            shards.append(Shard(Path(self._file.name).name, tokens, self._hash.hexdigest()))
        return Split(self.tokens, self.documents, self.text_bytes, shards)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
