"""Megatron-LM's pairs: tokens in a `.bin` file, and an `.idx` file that says where they are.

The format is that of megatron/core/datasets/indexed_dataset.py. The index has, little-endian:
9 bytes of magic, a version of 8 bytes, a type code of 1 byte, the numbers of sequences and of
document indices, 8 bytes each. Then come, for each sequence, its length (int32) and the byte where
it begins (int64); then 0 and the number of sequences up to the end of each document (int64). Data
with images also has a mode per sequence (int8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from lockstep_gpt.data.sources.files import File
from lockstep_gpt.data.sources.source import reading
from lockstep_gpt.data.sources.token_formats import Layout, Opener
from lockstep_gpt.errors import UserError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
START = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, document indices
PER_SEQUENCE = 12  # bytes: length and place
PER_DOCUMENT = 8  # bytes
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
AGAIN = "make it again with Megatron-LM's tools/preprocess_data.py"


@dataclass
class MegatronTokens:
    """A `.bin` file with the `.idx` file beside it."""

    remedy: ClassVar[str] = "raise it"

    file: File
    open: Opener
    index: File

    def layout(self, raw: BinaryIO) -> Layout:
        """Return the layout that the index tells.

        Raises:
            UserError: the index is damaged, or doesn't match the tokens, or they aren't ids.
        """
        with reading(self.index.path), self.open(self.index.path, "rb") as opened:
            content = opened.read()
        dtype, sequences, documents = self._start(content)
        self._check_length(len(content), sequences, documents)
        place = START.size
        lengths = np.frombuffer(content, "<i4", sequences, place)
        place += lengths.nbytes
        places = np.frombuffer(content, "<i8", sequences, place)
        place += places.nbytes
        indices = np.frombuffer(content, "<i8", documents, place)

        ends = np.zeros(sequences + 1, np.int64)  # in tokens; the first is where they begin
        np.cumsum(lengths, dtype=np.int64, out=ends[1:])
        tokens = int(ends[-1])
        if self.file.size != tokens * dtype.itemsize:
            raise UserError(
                f"{self.file.path} of the corpus has {self.file.size:,} bytes, but "
                f"{tokens * dtype.itemsize:,} in {self.index.path}; copy both files again"
            )
        if (lengths < 0).any() or not np.array_equal(places, ends[:-1] * dtype.itemsize):
            self._refuse("has sequences that are not one after another", AGAIN)
        return Layout(dtype, tokens, document_ends=ends[self._checked(indices, sequences)])

    def _start(self, content: bytes) -> tuple[np.dtype[Any], int, int]:
        """Return the type of the tokens and the numbers of sequences and document indices."""
        if not content.startswith(MAGIC):
            self._refuse("does not begin as an index of Megatron-LM does", AGAIN)
        if len(content) < START.size:
            self._refuse(f"has only {len(content)} bytes, so it is truncated", "copy it again")
        _, version, code, sequences, documents = START.unpack_from(content)
        if version != VERSION:
            self._refuse(f"has version {version}, but only version {VERSION} is known", AGAIN)
        if code not in TYPES:
            name = FLOATS.get(code, f"type {code}")
            self._refuse(f"says that the tokens are {name}, but ids are integers", AGAIN)
        return np.dtype(TYPES[code]), sequences, documents

    def _check_length(self, length: int, sequences: int, documents: int) -> None:
        """Raise a `UserError` if the index has another length than it says."""
        expected = START.size + sequences * PER_SEQUENCE + documents * PER_DOCUMENT
        if sequences and length == expected + sequences:
            self._refuse("has modes, as data with images does", "choose a corpus of text alone")
        if length != expected:
            self._refuse(f"has {length:,} bytes, but whole ones are {expected:,}", "copy it again")

    def _checked(self, indices: npt.NDArray[np.int64], sequences: int) -> npt.NDArray[np.int64]:
        """Return the sequences up to the end of each document."""
        is_whole = len(indices) and indices[0] == 0 and indices[-1] == sequences
        if not is_whole or (np.diff(indices) < 0).any():
            self._refuse("has documents that are not its sequences", AGAIN)
        return indices[1:]

    def _refuse(self, fault: str, remedy: str) -> None:
        raise UserError(f"{self.index.path} {fault}; {remedy}")
