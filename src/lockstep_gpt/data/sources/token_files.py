"""`data=shards`: token files from another program, plain or with a header.

The header is that of llm.c and modded-nanogpt: 256 integers of 32 bits. The first identifies the
type of the tokens; the third is their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data import tokenizer_choice
from lockstep_gpt.data.sources.files import File, Files, find_splits
from lockstep_gpt.data.sources.source import Position, Source, TokenBlock, reading
from lockstep_gpt.data.tokenizer import Tokenizer, token_dtype

HEADER = 1024  # bytes
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # for GPT-2, for Llama 3
STRETCH = 1 << 20  # tokens, of which the last are held out if no file is


@dataclass
class TokenFiles(Source):
    """Token files from another program: first those to train on, then those held out."""

    kind: ClassVar[str] = "shards"
    added_later: ClassVar[frozenset[str]] = Source.added_later | {"test_path"}

    path: str = setting("a file, a folder, a glob, or a URL", "", on_resume="machine")
    val_path: str | None = setting("validation files; null: the end of each 2^20 tokens", None)
    dtype: str = setting(
        "token type of files without a header, little-endian", "uint16", choices=tuple(DTYPES)
    )
    vocab_size: int = setting("size of the vocabulary", 50257, at_least=2)
    tokenizer: str = setting(
        "the tokens' byte-level BPE: gpt2, file, folder, or hub name; numbers: no tokenizer",
        "numbers",
    )
    test_path: str | None = setting("test files; null: test_fraction of each 2^20 tokens", None)

    @cached_property
    def found(self) -> list[Files]:
        """The files of `path`, of `val_path`, and of `test_path`."""
        return find_splits(self.path, self.val_path, self.test_path)

    @cached_property
    def files(self) -> list[File]:
        """All files, in the order in which they are read."""
        return [file for part in self.found for file in part.files]

    @property
    def size(self) -> int | None:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return self.test_path is not None or super().has_test

    def identity(self) -> Any:
        """Return the identity of the files, by split."""
        by_split = {part.split: part.identity() for part in self.found}
        parts = [by_split[None], by_split.get("val")]
        return [*parts, by_split["test"]] if "test" in by_split else parts

    def tokenizer_identity(self) -> Any:
        """Return the identity of the tokenizer that `data.tokenizer` names."""
        return tokenizer_choice.identity(self.tokenizer)

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens.

        Raises:
            UserError: its vocabulary has another size.
        """
        return tokenizer_choice.of_size(self.tokenizer, self.vocab_size)

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield the tokens, file by file."""
        read = start.read
        for part in range(start.part, len(self.files)):
            offset = start.offset if part == start.part else 0
            for split, ids in self._stretches(part, offset):
                offset, read = offset + len(ids), read + ids.nbytes
                self._check_ids(ids, part)
                yield TokenBlock(
                    Position(part, offset, read),
                    split,
                    ids.astype(token_dtype(self.vocab_size)),
                )

    def _stretches(self, part: int, offset: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield `(split, ids)` from token `offset` of a file; `offset` doesn't move the cuts."""
        path = self.files[part].path
        with reading(path), self._opener(part)(path, "rb") as raw:
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
        whole = self.files[part].split
        if whole is not None:
            return whole, last
        test = 0.0 if self.test_path is not None else self.test_fraction
        val = 0.0 if self.val_path is not None else self.val_fraction
        test_from = last - round((last - first) * test)
        val_from = test_from - round((last - first) * val)
        if offset < val_from:
            return "train", val_from
        if offset < test_from:
            return "val", test_from
        return "test", last

    def _opener(self, part: int) -> Any:
        """Return what opens the file of this number: those of a server aren't on this machine."""
        return next(each.open for each in self.found if self.files[part] in each.files)

    def _layout(self, header: bytes, part: int) -> tuple[np.dtype[Any], int]:
        """Return the type of a file's tokens and the offset of the first."""
        file = self.files[part]
        skip = 0
        dtype = DTYPES[self.dtype]
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

    def _check_ids(self, ids: npt.NDArray[Any], part: int) -> None:
        if ids.max() >= self.vocab_size:
            raise UserError(
                f"{self.files[part].path} of the corpus has the token {ids.max()}, but "
                f"data.vocab_size={self.vocab_size}; raise it, or change data.dtype"
            )
