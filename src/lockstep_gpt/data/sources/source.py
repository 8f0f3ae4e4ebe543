"""A corpus as blocks from which a build can resume, and the common parts of text sources."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import numpy as np

from lockstep_gpt import config as schema
from lockstep_gpt.config import DataConfig, UserError, setting
from lockstep_gpt.data.corpora import Stretch
from lockstep_gpt.data.tokenizer import Tokenizer, Tokens
from lockstep_gpt.extras.sources import byte_pairs

BLOCK = 1 << 20  # bytes that are processed together


@dataclass
class InShards(DataConfig):
    """Settings for several token files and loader processes."""

    num_workers: int = setting(
        "loader processes per rank; 0: the rank itself", 0, on_resume="free", at_least=0
    )
    shard_mb: int = setting("size of a token file in MiB", 256, at_least=1)


@dataclass
class DocumentsData(schema.DocumentsData, InShards):
    """Text settings of extra `sources`."""

    tokenizer: str = setting(
        "bytes; bpe (learned from the corpus); or file, folder, or hub name of a byte-level BPE",
        "bytes",
    )
    vocab_size: int | None = setting(
        "vocabulary size that bpe learns; null: 8192", None, at_least=257
    )
    tokenizer_mb: int = setting("MiB of training text that bpe learns from", 32, at_least=1)
    invalid_utf8: str = setting(
        "what to do with text that is not UTF-8", "replace", choices=("replace", "skip", "fail")
    )
    num_proc: int = setting("processes that tokenize", 1, on_resume="free", at_least=1)

    def __post_init__(self) -> None:
        """Also check that `vocab_size` has an effect, and set its default for `bpe`."""
        super().__post_init__()
        if self.tokenizer == "bpe":
            self.vocab_size = self.vocab_size or 8192
        elif self.vocab_size is not None:
            self.refuse(
                "vocab_size", f"has no effect with data.tokenizer={self.tokenizer}; remove it"
            )


class Position(NamedTuple):
    """Where reading a corpus resumes."""

    part: int = 0  # the file, in the corpus's order
    offset: int = 0  # bytes, rows, or tokens of it that come before
    read: int = 0  # bytes of the corpus that come before, as its `size` counts them


class Block(NamedTuple):
    """A stretch of a corpus."""

    after: Position
    texts: list[bytes]  # the documents, valid UTF-8
    val: list[bool]  # which of them are held out
    invalid: int = 0  # how many weren't UTF-8


class TokenBlock(NamedTuple):
    """A stretch of one split of a corpus that isn't text."""

    after: Position
    split: str
    ids: Tokens


class Blocks(ABC):
    """A corpus that is read block by block, starting at any block."""

    size: int | None
    tokenizer_identity: Any

    @abstractmethod
    def identity(self) -> Any:
        """Return plain values that change with anything in the corpus that changes the tokens."""

    @abstractmethod
    def make_tokenizer(self) -> Tokenizer:
        """Return its tokenizer, which may be trained on it."""

    @abstractmethod
    def blocks(self, start: Position) -> Iterator[Block] | Iterator[TokenBlock]:
        """Yield all blocks from `start`, the same ones each time, so that a build can resume.

        Raises:
            UserError: something can't be read.
        """

    def stretches(self) -> Iterator[Stretch]:
        """Yield all its text."""
        for block in self.blocks(Position()):
            if isinstance(block, Block):
                yield from stretches_of(block)


def stretches_of(block: Block) -> Iterator[Stretch]:
    """Yield the texts of a block, by split."""
    for split, chosen in (("train", map(not_, block.val)), ("val", block.val)):
        if texts := list(compress(block.texts, chosen)):
            yield Stretch(split, texts)


class Documents(Blocks):
    """A corpus of text, and the tokenizer that its settings name."""

    def __init__(self, config: DocumentsData) -> None:
        self.config = config
        sizes = config.vocab_size, config.tokenizer_mb
        self.tokenizer_identity: Any = byte_pairs.identity(config.tokenizer, *sizes)

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; `bpe` is trained on the first training documents."""
        config = self.config
        texts = byte_pairs.training_texts(self, config.tokenizer_mb << 20)
        return byte_pairs.make_tokenizer(config.tokenizer, config.vocab_size, texts)


def held_out(texts: list[bytes], val_fraction: float) -> list[bool]:
    """Return which documents without names are held out, based only on their text.

    So equal documents are never in both splits. The factor is Knuth's multiplicative hash: the
    checksums of similar lines are similar.
    """
    sums = np.fromiter(map(zlib.crc32, texts), np.uint32, len(texts))
    held: list[bool] = (sums * np.uint32(2_654_435_761) < val_fraction * 2**32).tolist()
    return held


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Report in one line what is wrong with a file: file systems and formats raise any error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        line = " ".join(reason.split())
        raise UserError(
            f"{path} cannot be read: {line}; fix it, or choose another corpus"
        ) from error


def is_utf8(text: bytes) -> bool:
    """Return whether `text` is valid UTF-8."""
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def valid(texts: list[bytes], policy: str, path: str) -> tuple[list[bytes], int]:
    """Return `texts` as UTF-8, following `data.invalid_utf8`, and how many weren't.

    Raises:
        UserError: one isn't, and the policy is `fail`.
    """
    good = [text for text in texts if is_utf8(text)]
    invalid = len(texts) - len(good)
    if invalid and policy == "fail":
        raise UserError(
            f"{path} of the corpus is not UTF-8; fix it, or set data.invalid_utf8 to replace or "
            "skip"
        )
    if invalid and policy == "replace":
        return [text.decode("utf-8", "replace").encode() for text in texts], invalid
    return good, invalid
