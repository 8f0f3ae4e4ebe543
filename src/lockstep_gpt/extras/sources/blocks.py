"""A corpus as blocks that a build can go on from, and what sources of many documents share."""

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

BLOCK = 1 << 20  # bytes that are handled together


@dataclass
class InShards(DataConfig):
    """What each of these sources takes."""

    num_workers: int = setting(
        "loader processes per rank; 0: the rank itself", 0, on_resume="free", at_least=0
    )
    shard_mb: int = setting("MiB of a token file", 256, at_least=1)


@dataclass
class DocumentsData(schema.DocumentsData, InShards):
    """What corpora of text have in common in extra `sources`."""

    tokenizer: str = setting(
        "bytes; bpe: learnt from the corpus; or a byte-level BPE's file, folder or name on the hub",
        "bytes",
    )
    vocab_size: int | None = setting("ids that bpe learns; null: 8192", None, at_least=257)
    tokenizer_mb: int = setting("MiB of training text, the first, bpe learns from", 32, at_least=1)
    invalid_utf8: str = setting(
        "what becomes of text that is not UTF-8", "replace", choices=("replace", "skip", "fail")
    )
    num_proc: int = setting("processes that tokenize", 1, on_resume="free", at_least=1)

    def __post_init__(self) -> None:
        """Check also that a size of the vocabulary has a use, and find it where it is needed."""
        super().__post_init__()
        if self.tokenizer == "bpe":
            self.vocab_size = self.vocab_size or 8192
        elif self.vocab_size is not None:
            self.refuse("vocab_size", f"has no use with data.tokenizer={self.tokenizer}; leave it")


class Position(NamedTuple):
    """Where a corpus goes on."""

    part: int = 0  # the file, in the corpus's order
    offset: int = 0  # bytes, rows or tokens of it that lie before
    read: int = 0  # bytes of the corpus that lie before, as its `size` counts them


class Block(NamedTuple):
    """A stretch of a corpus."""

    after: Position
    texts: list[bytes]  # the documents, valid UTF-8
    val: list[bool]  # which of them are held out
    invalid: int = 0  # how many were not UTF-8


class TokenBlock(NamedTuple):
    """A stretch of one split of a corpus that is no text."""

    after: Position
    split: str
    ids: Tokens


class Blocks(ABC):
    """A corpus that is read block by block, from any of them on."""

    size: int | None
    tokenizer_identity: Any

    @abstractmethod
    def identity(self) -> Any:
        """Return plain values that change with anything in the corpus that decides the tokens."""

    @abstractmethod
    def make_tokenizer(self) -> Tokenizer:
        """Return what makes its tokens; that may be learnt from it."""

    @abstractmethod
    def blocks(self, start: Position) -> Iterator[Block] | Iterator[TokenBlock]:
        """Yield all from `start` on, cut alike each time, so that a killed build can go on.

        Raises:
            UserError: something cannot be read.
        """

    def stretches(self) -> Iterator[Stretch]:
        """Yield all text of it."""
        for block in self.blocks(Position()):
            if isinstance(block, Block):
                yield from stretches_of(block)


def stretches_of(block: Block) -> Iterator[Stretch]:
    """Yield what a block has of each split."""
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
        """Return the tokenizer; `bpe` is learnt from the first of the training documents."""
        config = self.config
        texts = byte_pairs.training_texts(self, config.tokenizer_mb << 20)
        return byte_pairs.make_tokenizer(config.tokenizer, config.vocab_size, texts)


def held_out(texts: list[bytes], val_fraction: float) -> list[bool]:
    """Return which documents without names are held out, from their text alone.

    So equal documents are never in both splits. The factor is Knuth's multiplicative hash: the
    sums of similar lines are similar.
    """
    sums = np.fromiter(map(zlib.crc32, texts), np.uint32, len(texts))
    held: list[bool] = (sums * np.uint32(2_654_435_761) < val_fraction * 2**32).tolist()
    return held


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Say in one line what is wrong with a file: systems and formats raise what they like."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        line = " ".join(reason.split())
        raise UserError(
            f"{path} cannot be read: {line}; mend it, or take another corpus"
        ) from error


def is_utf8(text: bytes) -> bool:
    """Tell whether `text` is valid UTF-8."""
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def valid(texts: list[bytes], policy: str, path: str) -> tuple[list[bytes], int]:
    """Return `texts` as UTF-8, by `data.invalid_utf8`, and how many were not.

    Raises:
        UserError: one is not, and the policy is to fail.
    """
    good = [text for text in texts if is_utf8(text)]
    invalid = len(texts) - len(good)
    if invalid and policy == "fail":
        raise UserError(
            f"{path} of the corpus is not UTF-8; mend it, or set data.invalid_utf8 to replace or "
            "skip"
        )
    if invalid and policy == "replace":
        return [text.decode("utf-8", "replace").encode() for text in texts], invalid
    return good, invalid
