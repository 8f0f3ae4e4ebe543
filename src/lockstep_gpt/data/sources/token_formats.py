"""Token files: what every format has in common, and files that are nothing but tokens.

In all formats that we read, a file's tokens are one flat array, so a format only says where that
array is. Formats with an index beside the tokens are in megatron.py, litdata.py, and datatrove.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from lockstep_gpt.data.sources.files import File
from lockstep_gpt.errors import UserError

Opener = Callable[..., Any]
Ids = npt.NDArray[np.integer[Any]]

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

# The header of llm.c (dev/data/data_common.py) and of modded-nanogpt (data/fineweb.py): 256
# integers of 32 bits. The first tells the type of the tokens; the third is their number.
HEADER = 1024  # bytes
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # for GPT-2, for Llama 3


def no_ends() -> npt.NDArray[np.int64]:
    """Return the ends of documents in a format that doesn't record them."""
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Layout:
    """Where the tokens are in a file."""

    dtype: np.dtype[Any]
    tokens: int
    skip: int = 0  # bytes before the first token
    document_ends: npt.NDArray[np.int64] = field(default_factory=no_ends)  # ascending, in tokens


class TokenFormat(Protocol):
    """A file with tokens, in the format of some program."""

    @property
    def file(self) -> File:
        """The file with the tokens."""

    @property
    def open(self) -> Opener:
        """What opens the file, which may be on a server."""

    @property
    def remedy(self) -> str:
        """What helps if a token is not below `data.vocab_size`."""

    def layout(self, raw: BinaryIO) -> Layout:
        """Return where the tokens are in the opened file.

        Raises:
            UserError: the file, or the index beside it, is damaged or has no tokens.
        """


class TokenReader:
    """Reads the tokens of an opened file by their numbers."""

    def __init__(self, raw: BinaryIO, layout: Layout) -> None:
        self.raw = raw
        self.layout = layout

    @property
    def tokens(self) -> int:
        """How many tokens the file has."""
        return self.layout.tokens

    def read(self, start: int, stop: int) -> Ids:
        """Return the tokens from `start` up to `stop`, of the file's own type.

        Raises:
            ValueError: the file became shorter.
        """
        itemsize = self.layout.dtype.itemsize
        count = stop - start
        self.raw.seek(self.layout.skip + start * itemsize)
        return np.frombuffer(self.raw.read(count * itemsize), self.layout.dtype, count)

    def documents(self, start: int, stop: int) -> int:
        """Return how many documents end after token `start` and not after `stop`."""
        ends = self.layout.document_ends
        first, last = np.searchsorted(ends, [start, stop], side="right")
        return int(last - first)


@dataclass
class PlainTokens:
    """Nothing but tokens, as nanoGPT writes them, or tokens after the header of llm.c."""

    remedy: ClassVar[str] = "raise it, or change data.dtype"

    file: File
    open: Opener
    dtype: str  # of a file without header

    def layout(self, raw: BinaryIO) -> Layout:
        """Return the layout that the header tells, or that of tokens alone.

        Raises:
            UserError: the size is not that of whole tokens, or not what the header says.
        """
        words = np.frombuffer(_complete_words(raw.read(HEADER)), "<i4")
        if len(words) == HEADER // 4 and int(words[0]) in MAGIC:
            return self._after_header(DTYPES[MAGIC[int(words[0])]], int(words[2]))
        dtype = DTYPES[self.dtype]
        rest = self.file.size % dtype.itemsize
        if rest:
            raise UserError(
                f"{self.file.path} of the corpus has {self.file.size:,} bytes, but whole tokens "
                f"are {self.file.size - rest:,}; download it again, or set data.dtype"
            )
        return Layout(dtype, self.file.size // dtype.itemsize)

    def _after_header(self, dtype: np.dtype[Any], tokens: int) -> Layout:
        expected = HEADER + tokens * dtype.itemsize
        if self.file.size != expected:
            raise UserError(
                f"{self.file.path} of the corpus has {self.file.size:,} bytes, but {expected:,} "
                f"with the {tokens:,} tokens of its header; download it again"
            )
        return Layout(dtype, tokens, HEADER)


def _complete_words(header: bytes) -> bytes:
    """Return a file's start without an incomplete integer at its end."""
    return header[: len(header) // 4 * 4]
