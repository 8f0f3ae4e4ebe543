"""Tokenized files of datatrove: `.ds` files, and the files next to each.

The format is what `DocumentTokenizer` and `DocumentTokenizerMerger` write, as in datatrove's
pipeline/tokens/tokenizer.py. A `.ds` file has tokens alone, of 2 or 4 bytes, little-endian. Beside
it, `.ds.index` has where each document ends, counted in tokens (uint64); `.ds.metadata` is text, a
line `TOKENIZER|BYTES OF A TOKEN`, then a line with the number of tokens; and `.ds.loss` has a byte
for each token, 0 for those without a loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from lockstep_gpt.data.sources.files import File
from lockstep_gpt.data.sources.source import reading
from lockstep_gpt.data.sources.token_formats import DTYPES, Layout, Opener, no_ends
from lockstep_gpt.errors import UserError

TOKENS = ".ds"
INDEX = ".index"
METADATA = ".metadata"
MASK = ".loss"
BESIDE = (INDEX, METADATA, MASK)  # after the name with .ds
DTYPE_OF_SIZE = {"2": "uint16", "4": "uint32"}
AGAIN = "copy both files again"


def tokens_of(path: str) -> str | None:
    """Return the path of the tokens that a file is beside, or None."""
    for ending in BESIDE:
        if path.endswith(TOKENS + ending):
            return path.removesuffix(ending)
    return None


@dataclass
class DatatroveTokens:
    """A `.ds` file, its index, and its metadata."""

    remedy: ClassVar[str] = "raise it, or change data.dtype"

    file: File
    open: Opener
    dtype: str  # of a file without metadata
    files: Mapping[str, File]  # by path, of the corpus

    def layout(self, raw: BinaryIO) -> Layout:
        """Return the layout, of which the metadata tells the type, and the index the documents.

        Raises:
            UserError: the files don't fit together, or some tokens have no loss.
        """
        mask = self.file.path + MASK
        if mask in self.files:
            raise UserError(
                f"{mask} says which tokens have a loss, which is not used; remove it to train on "
                "all tokens"
            )
        dtype = DTYPES[self.dtype]
        count = None
        metadata = self._read(METADATA)
        if metadata is not None:
            dtype, count = self._described(metadata, dtype)
        tokens, rest = divmod(self.file.size, dtype.itemsize)
        if rest or count not in (None, tokens):
            raise UserError(
                f"{self.file.path} of the corpus has {self.file.size:,} bytes, which is not "
                f"{'whole' if count is None else f'{count:,}'} tokens of {dtype.itemsize} bytes; "
                "copy it again, or set data.dtype"
            )
        ends = no_ends()
        index = self._read(INDEX)
        if index is not None:
            ends = np.frombuffer(index[: len(index) // 8 * 8], "<u8").astype(np.int64)
            is_whole = len(index) % 8 == 0 and (not tokens or (len(ends) and ends[-1] == tokens))
            if not is_whole or (np.diff(ends) < 0).any():
                raise UserError(
                    f"{self.file.path}{INDEX} does not end with the {tokens:,} tokens of its file; "
                    f"{AGAIN}"
                )
        return Layout(dtype, tokens, document_ends=ends)

    def _described(
        self, metadata: bytes, default: np.dtype[Any]
    ) -> tuple[np.dtype[Any], int | None]:
        """Return the type and the number of tokens; early versions don't tell the type."""
        lines = metadata.decode("utf-8", "replace").splitlines()
        if len(lines) < 2 or not re.fullmatch(r"\d+", lines[1]):
            raise UserError(
                f"{self.file.path}{METADATA} is not datatrove's, with the number of tokens in its "
                "second line; copy it again"
            )
        size = lines[0].rpartition("|")[2]
        dtype = default
        if size in DTYPE_OF_SIZE:
            dtype = DTYPES[DTYPE_OF_SIZE[size]]
        return dtype, int(lines[1])

    def _read(self, ending: str) -> bytes | None:
        """Return the content of a file beside the tokens; None: there is none."""
        file = self.files.get(self.file.path + ending)
        if file is None:
            return None
        with reading(file.path), self.open(file.path, "rb") as opened:
            content: bytes = opened.read()
        return content
