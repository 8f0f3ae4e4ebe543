"""`data=shards`: token files from another program, whose format is detected.

These are plain tokens, tokens after the header of llm.c, Megatron-LM's pairs of files, datatrove's
files with what is beside them, and folders of litData.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from lockstep_gpt.data import tokenizer_choice
from lockstep_gpt.data.sources.files import Files
from lockstep_gpt.data.sources.source import Position, Source, TokenBlock, reading
from lockstep_gpt.data.sources.token_detection import find_token_files, formats_of
from lockstep_gpt.data.sources.token_formats import (
    DTYPES,
    Ids,
    TokenFormat,
    TokenReader,
)
from lockstep_gpt.data.tokenizer import Tokenizer, token_dtype
from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import setting

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
    vocab_size: int = setting("size of the vocabulary", 50257, at_least=2, at_most=10**7)
    tokenizer: str = setting(
        "the tokens' byte-level BPE: gpt2, file, folder, or hub name; numbers: no tokenizer",
        "numbers",
    )
    test_path: str | None = setting("test files; null: test_fraction of each 2^20 tokens", None)

    @cached_property
    def file_groups(self) -> list[Files]:
        """The files of `path`, of `val_path`, and of `test_path`, with their indices."""
        groups = [find_token_files(self.path, "data.path", None)]
        if self.val_path is not None:
            groups.append(find_token_files(self.val_path, "data.val_path", "val"))
        if self.test_path is not None:
            groups.append(find_token_files(self.test_path, "data.test_path", "test"))
        return groups

    @cached_property
    def parts(self) -> list[TokenFormat]:
        """All files with tokens, in the order in which they are read."""
        return [part for group in self.file_groups for part in formats_of(group, self.dtype)]

    @property
    def size(self) -> int | None:
        """The bytes of all files with tokens."""
        return sum(part.file.size for part in self.parts)

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return self.test_path is not None or super().has_test

    def identity(self) -> Any:
        """Return the identity of the files, by split."""
        by_split = {group.split: group.identity() for group in self.file_groups}
        identities = [by_split[None], by_split.get("val")]
        if "test" in by_split:
            identities.append(by_split["test"])
        return identities

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
        """Yield the tokens, file by file; where reading starts doesn't move the cuts.

        Raises:
            UserError: a file is damaged, or has tokens outside the vocabulary.
        """
        read = start.read
        for number in range(start.part, len(self.parts)):
            part = self.parts[number]
            offset = start.offset_in(number)
            path = part.file.path
            with reading(path), part.open(path, "rb") as raw:
                reader = TokenReader(raw, part.layout(raw))
                while offset < reader.tokens:
                    split, end = self._end(part, offset, reader.tokens)
                    ids = reader.read(offset, end)
                    self._check_ids(ids, part)
                    documents = reader.documents(offset, end)
                    offset = end
                    read += ids.nbytes
                    yield TokenBlock(
                        Position(number, offset, read),
                        split,
                        ids.astype(token_dtype(self.vocab_size)),
                        documents,
                    )

    def _end(self, part: TokenFormat, offset: int, total: int) -> tuple[str, int]:
        """Return the split of token `offset`, and where the split changes or the stretch ends."""
        first = offset // STRETCH * STRETCH
        last = min(first + STRETCH, total)
        split = part.file.split
        if split is not None:
            return split, last
        test = 0.0 if self.test_path is not None else self.test_fraction
        val = 0.0 if self.val_path is not None else self.val_fraction
        test_from = last - round((last - first) * test)
        val_from = test_from - round((last - first) * val)
        if offset < val_from:
            return "train", val_from
        if offset < test_from:
            return "val", test_from
        return "test", last

    def _check_ids(self, ids: Ids, part: TokenFormat) -> None:
        if ids.min() < 0:
            raise UserError(
                f"{part.file.path} of the corpus has the token {ids.min()}, but ids are at least "
                "0; make the file again"
            )
        if ids.max() >= self.vocab_size:
            raise UserError(
                f"{part.file.path} of the corpus has the token {ids.max()}, but "
                f"data.vocab_size={self.vocab_size}; {part.remedy}"
            )
