"""`data=shards`: token files from another program, plain or with a header.

The header is that of llm.c and modded-nanogpt: 256 integers of 32 bits. The first identifies the
type of the tokens; the third is their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data.tokenizer import Tokenizer, token_dtype
from lockstep_gpt.extras.sources import byte_pairs
from lockstep_gpt.extras.sources.blocks import (
    Blocks,
    InShards,
    Position,
    TokenBlock,
    reading,
)
from lockstep_gpt.extras.sources.files import Files
from lockstep_gpt.extras.sources.numbers import NumberTokenizer

HEADER = 1024  # bytes
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # for GPT-2, for Llama 3
STRETCH = 1 << 20  # tokens, of which the last are held out if no file is


@dataclass
class ShardsData(InShards):
    """Token files from another program."""

    source: str = setting("where the tokens come from", "shards", choices=("shards",))
    path: str = setting("a file, a folder, a glob, or a URL", "", on_resume="machine")
    val_path: str | None = setting("validation files; null: the end of each 2^20 tokens", None)
    dtype: str = setting(
        "token type of files without a header, little-endian", "uint16", choices=tuple(DTYPES)
    )
    vocab_size: int = setting("size of the vocabulary", 50257, at_least=2)
    tokenizer: str = setting(
        "the tokens' byte-level BPE: file, folder, or hub name; numbers: no tokenizer",
        "numbers",
    )


class TokenFiles(Blocks):
    """The tokens of files, sorted by name: first the training files, then the validation files."""

    def __init__(self, config: ShardsData) -> None:
        self.config = config
        self.train = Files(config.path)
        self.val = Files(config.val_path) if config.val_path else None
        held_out = self.val.files if self.val else []
        self.files = [*self.train.files, *held_out]
        self.size: int | None = sum(file.size for file in self.files)
        self.tokenizer_identity: Any = byte_pairs.identity(config.tokenizer)

    def identity(self) -> Any:
        """Return the identity of the files, and of those that are held out."""
        return [self.train.identity(), self.val and self.val.identity()]

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens.

        Raises:
            UserError: its vocabulary has another size.
        """
        config = self.config
        if config.tokenizer == NumberTokenizer.kind:
            return NumberTokenizer(config.vocab_size)
        made = byte_pairs.make_tokenizer(config.tokenizer, config.vocab_size, ())
        if made.vocab_size != config.vocab_size:
            raise UserError(
                f"data.vocab_size={config.vocab_size} is not that of data.tokenizer="
                f"{config.tokenizer}; set data.vocab_size={made.vocab_size}"
            )
        return made

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield the tokens, file by file."""
        read = start.read
        for part in range(start.part, len(self.files)):
            offset = start.offset if part == start.part else 0
            for split, ids in self._stretches(part, offset):
                offset, read = offset + len(ids), read + ids.nbytes
                self._check(ids, part)
                yield TokenBlock(
                    Position(part, offset, read),
                    split,
                    ids.astype(token_dtype(self.config.vocab_size)),
                )

    def _stretches(self, part: int, offset: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield `(split, ids)` from token `offset` of a file; `offset` doesn't move the cuts."""
        path = self.files[part].path
        with reading(path), self._files(part).open(path, "rb") as raw:
            dtype, skip = self._layout(raw.read(HEADER), part)
            total = (self.files[part].size - skip) // dtype.itemsize
            while offset < total:
                split, end = self._end(part, offset, total)
                raw.seek(skip + offset * dtype.itemsize)
                ids = np.frombuffer(raw.read((end - offset) * dtype.itemsize), dtype)
                offset = end
                yield split, ids

    def _end(self, part: int, offset: int, total: int) -> tuple[str, int]:
        """Return the split of token `offset`, and where the split changes or the stretch ends."""
        first = offset // STRETCH * STRETCH
        last = min(first + STRETCH, total)
        if self.val:
            return ("train" if part < len(self.train.files) else "val"), last
        change = last - round((last - first) * self.config.val_fraction)
        return ("train", change) if offset < change else ("val", last)

    def _files(self, part: int) -> Files:
        return self.train if part < len(self.train.files) or not self.val else self.val

    def _layout(self, header: bytes, part: int) -> tuple[np.dtype[Any], int]:
        """Return the type of a file's tokens and the offset of the first."""
        file, skip = self.files[part], 0
        dtype = DTYPES[self.config.dtype]
        words = np.frombuffer(header[: len(header) // 4 * 4], "<i4")
        expected = file.size - file.size % dtype.itemsize
        if len(words) == HEADER // 4 and int(words[0]) in MAGIC:
            dtype, skip = DTYPES[MAGIC[int(words[0])]], HEADER
            expected = HEADER + int(words[2]) * dtype.itemsize
        if file.size != expected:
            raise UserError(
                f"{file.path} of the corpus has {file.size:,} bytes, but whole tokens are "
                f"{expected:,}; download it again, or set data.dtype"
            )
        return dtype, skip

    def _check(self, ids: npt.NDArray[Any], part: int) -> None:
        if ids.max() >= self.config.vocab_size:
            raise UserError(
                f"{self.files[part].path} of the corpus has the token {ids.max()}, but "
                f"data.vocab_size={self.config.vocab_size}; raise it, or change data.dtype"
            )
