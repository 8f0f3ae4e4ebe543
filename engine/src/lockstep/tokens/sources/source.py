"""What every source of training data has in common; a YAML file in configs/source/ names its class.

A source is a dataclass: its fields are its settings, its methods read it. `prepare` reads it block
by block, so a build that was killed can continue after any block.

A wrong setting is named without its place, which is `data.source` on the command line.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from lockstep.errors import UserError
from lockstep.loading import order
from lockstep.settings import Checked, Decides, check, setting
from lockstep.tokens import tokenizer_choice
from lockstep.tokens.tokenizer import ByteTokenizer, Tokenizer, Tokens

BLOCK = 1 << 20  # bytes of text that are processed together
SPLITS = ("train", "val", "test")
SMALLEST_BPE = 257  # all bytes and the end of text
DOCUMENTS = "whole documents"  # what a split consists of


class Position(NamedTuple):
    """Where reading a source resumes."""

    part: int = 0  # the file, in the source's order
    offset: int = 0  # bytes, rows, or tokens of it that come before
    read: int = 0  # bytes of the source that come before, as its `size` counts them

    def offset_in(self, part: int) -> int:
        """Return the offset in a part from which to read: 0 in all parts but the first."""
        return self.offset if part == self.part else 0


class Block(NamedTuple):
    """A stretch of text."""

    after: Position
    texts: list[bytes]  # the documents, valid UTF-8
    splits: list[str]  # the split of each document
    invalid: int = 0  # how many weren't UTF-8


class TokenBlock(NamedTuple):
    """A stretch of one split that consists of tokens already."""

    after: Position
    split: str
    ids: Tokens
    documents: int = 0
    text_bytes: int = 0


@dataclass
class Source(Checked, ABC):
    """A corpus, its settings, and how its tokens become samples."""

    kind: ClassVar[str] = "own"  # begins the names of prepared folders
    # Settings that later versions added. They change a fingerprint only if they are in use, so
    # folders that earlier versions prepared keep theirs.
    added_later: ClassVar[frozenset[str]] = frozenset({"test_fraction"})
    held_out: ClassVar[Any] = None  # what the validation split consists of, in words

    root: str = setting("folder for prepared token files", "data", decides="nothing")
    fingerprint: str | None = setting(
        "hash that the prepared tokens must have; null: that of the current corpus",
        None,
        decides="nothing",
    )
    val_fraction: float = setting("fraction held out for validation", 0.02, above=0, below=1)
    test_fraction: float = setting("fraction held out for tests", 0.0, at_least=0, below=1)
    shard_mb: int = setting("size of a token file in MiB", 256, at_least=1)

    def __post_init__(self) -> None:
        """Also check that something is left to train on."""
        super().__post_init__()
        check(
            "data.root",
            self.root,
            "://" not in self.root,
            "is a URL, and ranks map prepared tokens from a disk; set a folder, and copy what is "
            "at the URL into it",
        )
        if self.val_fraction + self.test_fraction >= 1:
            self.refuse("test_fraction", f"and val_fraction={self.val_fraction} leave nothing")

    @classmethod
    def deciding(cls) -> list[str]:
        """Return the names of the settings that decide tokens."""
        return [item.name for item in fields(cls) if decided_by(item) == "tokens"]

    def recorded(self, name: str) -> Any:
        """Return a setting's value as fingerprints and runs record it."""
        return getattr(self, name)

    def marks(self) -> dict[str, Any]:
        """Return, as JSON values, what can't change without a new look at the corpus."""
        values = {
            item.name: self.recorded(item.name)
            for item in fields(self)
            if decided_by(item) != "nothing"
        }
        text = json.dumps({"kind": self.kind, **values}, default=_mark)
        return cast("dict[str, Any]", json.loads(text))

    @abstractmethod
    def identity(self) -> Any:
        """Return plain values that change with anything in the corpus that changes the tokens."""

    @abstractmethod
    def tokenizer_identity(self) -> Any:
        """Return plain values that change with anything that changes the ids of a text."""

    @abstractmethod
    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which may be trained on the corpus."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """The bytes to read, for a progress bar; None if unknown before the end."""

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return self.test_fraction > 0

    @abstractmethod
    def blocks(self, start: Position) -> Iterator[Block] | Iterator[TokenBlock]:
        """Yield all blocks from `start`, the same ones each time, so that a build can resume.

        Raises:
            UserError: something can't be read.
        """

    def order(
        self, sizes: Mapping[str, int], samples: int, block_size: int, seed: int
    ) -> order.Order:
        """Return which window each position of a run takes.

        Args:
            sizes: training windows of each part of the corpus, in the order that numbers them.
            samples: training windows of the whole run.
            block_size: tokens of a window.
            seed: of the run.
        """
        return order.Shuffled(sum(sizes.values()), seed)


def decided_by(item: Field[Any]) -> Decides:
    """Return what a setting of a source decides; see `setting`."""
    return cast(Decides, item.metadata.get("decides", "tokens"))


def _mark(value: Any) -> Any:
    """Return the marks of a source in a source; of what isn't plain, the class."""
    return value.marks() if isinstance(value, Source) else type(value).__qualname__


@dataclass
class Documents(Source):
    """A corpus of text; a source of your own needs only `read_documents` and `identity`."""

    held_out: ClassVar[Any] = DOCUMENTS

    tokenizer: str = setting(
        "bytes; bpe (learned from the corpus); gpt2; file, folder, or hub name of a byte-level "
        "BPE; or a class of this package",
        "bytes",
    )
    vocab_size: int | None = setting("size to learn; null: 8192 for bpe", None, at_least=2)
    tokenizer_mb: int = setting("MiB of training text that bpe learns from", 32, at_least=1)
    invalid_utf8: str = setting(
        "what to do with text that is not UTF-8", "replace", choices=("replace", "skip", "fail")
    )
    num_proc: int = setting("tokenizing processes", 1, decides="nothing", at_least=1, at_most=1024)

    def __post_init__(self) -> None:
        """Also check that `vocab_size` fits the tokenizer, and set its default for `bpe`."""
        super().__post_init__()
        if self.tokenizer == "bpe":
            self.vocab_size = self.vocab_size or 8192
            if self.vocab_size < SMALLEST_BPE:
                self.refuse("vocab_size", f"must be at least {SMALLEST_BPE} for bpe")
        elif self.vocab_size is not None and not tokenizer_choice.names_class(self.tokenizer):
            rule = f"has no effect with tokenizer={self.tokenizer}; set it to null, or set "
            self.refuse("vocab_size", f"{rule}tokenizer=bpe, which learns that many")

    def tokenizer_identity(self) -> Any:
        """Return the identity of the tokenizer that `tokenizer` names."""
        return tokenizer_choice.identity(self.tokenizer, self.vocab_size, self.tokenizer_mb)

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; one that learns does so from the first training documents."""
        texts = training_texts(self, self.tokenizer_mb << 20)
        return tokenizer_choice.make_tokenizer(self.tokenizer, self.vocab_size, texts)

    @property
    def size(self) -> int | None:
        """None: unknown before the end."""
        return None

    def read_documents(self) -> Iterator[bytes | str]:
        """Yield every document, always in the same order.

        Raises:
            UserError: something can't be read.
        """
        raise NotImplementedError(f"{type(self).__name__} yields its documents here")

    def splits_of(self, texts: Sequence[bytes]) -> list[str]:
        """Return the split of each document, by its text."""
        return splits_of_texts(texts, self.val_fraction, self.test_fraction)

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the documents that aren't empty, about `BLOCK` bytes at a time."""
        after = start
        waiting: list[bytes] = []
        size = 0
        for document in islice(self.read_documents(), start.offset, None):
            if isinstance(document, str):
                text = document.encode("utf-8", "replace")
            else:
                text = document
            after = Position(0, after.offset + 1, after.read + len(text))
            size += len(text)
            waiting.append(text)
            if size >= BLOCK:
                yield self.block_of(after, waiting, self.kind)
                waiting = []
                size = 0
        if waiting:
            yield self.block_of(after, waiting, self.kind)

    def block_of(self, after: Position, texts: list[bytes], place: str) -> Block:
        """Return the block of these documents, of which `place` says where they are from."""
        documents, invalid = to_utf8([text for text in texts if text], self.invalid_utf8, place)
        refuse_nul(documents, self.tokenizer, place)
        return Block(after, documents, self.splits_of(documents), invalid)


def group_by_split(block: Block) -> Iterator[tuple[str, list[bytes]]]:
    """Yield each split in a block, with its texts."""
    for split in sorted(set(block.splits), key=SPLITS.index):
        pairs = zip(block.texts, block.splits, strict=True)
        yield split, [text for text, split_of_text in pairs if split_of_text == split]


def training_texts(source: Source, size: int) -> Iterator[str]:
    """Yield the first `size` bytes of the training documents, to train a tokenizer on."""
    for block in source.blocks(Position()):
        assert isinstance(block, Block), "tokens have a tokenizer already"
        for text, split in zip(block.texts, block.splits, strict=True):
            if split != "train":
                continue
            if size <= 0:
                return
            yield text[:size].decode("utf-8", "ignore")
            size -= len(text)


def split_of_name(name: str, val_fraction: float, test_fraction: float) -> str:
    """Return a document's split by its name and the fractions alone: the same everywhere."""
    digest = sha256(name.encode("utf-8", "surrogateescape")).digest()
    place = int.from_bytes(digest[:8])
    if place < val_fraction * 2**64:
        return "val"
    if place < (val_fraction + test_fraction) * 2**64:
        return "test"
    return "train"


def splits_of_texts(texts: Sequence[bytes], val_fraction: float, test_fraction: float) -> list[str]:
    """Return the split of each document without a name, based only on its text.

    So equal documents are never in two splits. The factor is Knuth's multiplicative hash: the
    checksums of similar lines are similar.
    """
    sums = np.fromiter(map(zlib.crc32, texts), np.uint32, len(texts))
    places = (sums * np.uint32(2_654_435_761)).astype(np.float64)
    is_val = places < val_fraction * 2**32
    is_test = ~is_val & (places < (val_fraction + test_fraction) * 2**32)
    names: list[str] = np.where(is_val, "val", np.where(is_test, "test", "train")).tolist()
    return names


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
        part = getattr(error, "filename", None)
        if isinstance(part, str) and part not in path:
            line = f"{part}: {line}"
        raise UserError(
            f"{path} cannot be read: {line}; fix it, or choose another corpus"
        ) from error


def is_utf8(text: bytes) -> bool:
    """Return whether `text` is valid UTF-8."""
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def to_utf8(texts: list[bytes], policy: str, path: str) -> tuple[list[bytes], int]:
    """Return `texts` as UTF-8, following `data.source.invalid_utf8`, and how many weren't.

    Raises:
        UserError: one isn't, and the policy is `fail`.
    """
    good = [text for text in texts if is_utf8(text)]
    invalid = len(texts) - len(good)
    if invalid and policy == "fail":
        raise UserError(
            f"{path} of the corpus is not UTF-8; fix it, or set data.source.invalid_utf8 to "
            "replace or skip"
        )
    if invalid and policy == "replace":
        return [text.decode("utf-8", "replace").encode() for text in texts], invalid
    return good, invalid


def refuse_nul(texts: list[bytes], tokenizer: str, path: str) -> None:
    """Raise a `UserError` if a text has a NUL byte, with which `tokenizer=bytes` ends texts.

    Args:
        texts: documents of one file.
        tokenizer: the setting `tokenizer`; others have an id for NUL.
        path: the file.
    """
    if tokenizer != ByteTokenizer.kind or b"\0" not in b"".join(texts):
        return
    text = next(text for text in texts if b"\0" in text)
    raise UserError(
        f"{path} of the corpus has a text with a NUL byte, which ends a document with "
        f"tokenizer=bytes; remove it from {text[:60]!r}, or choose another tokenizer"
    )


def refuse_binary(piece: bytes, path: str) -> None:
    """Raise a `UserError` if a piece of a file contains NUL bytes, as binary data and UTF-16 do."""
    if b"\0" in piece:
        remedy = "save it as UTF-8, or name the texts alone with a glob"
        raise UserError(f"{path} is not text: it has NUL bytes; {remedy}")
