"""Sources of tokens, not text: `data=shards` and `data=synthetic`.

`shards` are token files from another program, as nanoGPT and llm.c write them. Such a `.bin` file
is one flat array of tokens. That of llm.c follows a header. `synthetic` is uniformly random tokens,
for benchmarks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError
from lockstep.settings import setting
from lockstep.tokens import tokenizer_choice
from lockstep.tokens.sources.files import File, Files, find_splits
from lockstep.tokens.sources.number_types import (
    NPY,
    OTHER,
    UNPACK,
    Guess,
    conversion,
    fitting_type,
    format_of,
    guess_type,
    sample_of,
)
from lockstep.tokens.sources.source import BLOCK, Position, Source, TokenBlock, reading
from lockstep.tokens.tokenizer import NumberTokenizer, Tokenizer, token_dtype

logger = logging.getLogger(__name__)

STRETCH = 1 << 20  # tokens, of which the last are held out if no file is
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DTYPE = "uint16"
# The header of llm.c (dev/data/data_common.py) and of modded-nanogpt (data/fineweb.py): 256
# integers of 32 bits. The first tells the type of the tokens; the third is their number.
HEADER = 1024  # bytes
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # for GPT-2, for Llama 3
TOKENS = ".bin"
ALONE = "remove it, or name the token files alone, as in data.source.path=FOLDER/*.bin"
REMEDIES = {
    ".txt": "use data=text",
    ".json": "use data=jsonl",
    ".jsonl": "use data=jsonl",
    ".parquet": "use data=parquet",
    ".npy": NPY,
}
PACKED = (".gz", ".zst")
SEED = 20_231  # fixed: `seed` determines the order of samples, not the samples


@dataclass(frozen=True)
class TokenFile:
    """A file with tokens, and what opens it, which may be a server's file system."""

    file: File
    open: Callable[..., Any]


class TokenReader:
    """Reads the tokens of an opened file by their numbers.

    Args:
        raw: the opened file.
        file: what is known of it.
        dtype: the type of its tokens if it has no header.

    Attributes:
        has_header: whether its header tells the type.
        fault: what is wrong with its size; empty if nothing is.

    Raises:
        UserError: it is of another format.
    """

    def __init__(self, raw: BinaryIO, file: File, dtype: str) -> None:
        self.raw = raw
        self.skip = 0  # bytes before the first token
        self.dtype = DTYPES[dtype]
        start = raw.read(HEADER)
        words = np.frombuffer(start[: len(start) // 4 * 4], "<i4")
        self.has_header = len(words) == HEADER // 4 and int(words[0]) in MAGIC
        if self.has_header:
            self.skip = HEADER
            self.dtype = DTYPES[MAGIC[int(words[0])]]
            self.tokens = int(words[2])
            expected = HEADER + self.tokens * self.dtype.itemsize
            fault = f"{expected:,} with the {self.tokens:,} tokens of its header; download it again"
        else:
            other = format_of(start, file.size)
            if other:
                name, remedy = other
                raise UserError(f"{file.path} is {name}, not a flat array of tokens; {remedy}")
            self.tokens = file.size // self.dtype.itemsize
            expected = self.tokens * self.dtype.itemsize
            fault = f"whole tokens are {expected:,}; download it again, or set data.source.dtype"
        self.fault = ""
        if file.size != expected:
            self.fault = f"{file.path} of the corpus has {file.size:,} bytes, but {fault}"

    def sample(self, part: TokenFile) -> bytes:
        """Return bytes from several places of the file, which has no header."""

        def read(start: int, size: int) -> bytes:
            self.raw.seek(start)
            return self.raw.read(size)

        return sample_of(read, part.file.size, is_here=part.open is open)

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the tokens from `start` up to `stop`, of the file's own type.

        Raises:
            ValueError: the file became shorter.
        """
        itemsize = self.dtype.itemsize
        count = stop - start
        self.raw.seek(self.skip + start * itemsize)
        return np.frombuffer(self.raw.read(count * itemsize), self.dtype, count)


@dataclass
class TokenFiles(Source):
    """Token files from another program: first those to train on, then those held out."""

    kind: ClassVar[str] = "shards"
    added_later: ClassVar[frozenset[str]] = Source.added_later | {"test_path"}

    path: str = setting("a file, a folder, a glob, or a URL", "", decides="place")
    val_path: str | None = setting("validation files; null: the end of each 2^20 tokens", None)
    dtype: str | None = setting(
        "token type of files without a header, little-endian; null: uint16, if they seem to be",
        None,
        choices=tuple(DTYPES),
    )
    vocab_size: int = setting("size of the vocabulary", 50257, at_least=2, at_most=10**7)
    tokenizer: str = setting(
        "the tokens' byte-level BPE: gpt2, file, folder, or hub name; numbers: no tokenizer",
        "numbers",
    )
    test_path: str | None = setting("test files; null: test_fraction of each 2^20 tokens", None)

    @cached_property
    def file_groups(self) -> list[Files]:
        """The files of `path`, of `val_path`, and of `test_path`."""
        return find_splits(self.path, self.val_path, self.test_path)

    @cached_property
    def parts(self) -> list[TokenFile]:
        """All files, in the order in which they are read.

        Raises:
            UserError: one is not a `.bin` file.
        """
        parts = [TokenFile(file, group.open) for group in self.file_groups for file in group.files]
        for part in parts:
            _refuse_other(part.file.path)
        return parts

    @property
    def size(self) -> int | None:
        """The bytes of all files."""
        return sum(part.file.size for part in self.parts)

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return self.test_path is not None or super().has_test

    def identity(self) -> Any:
        """Return the identity of the files, by split."""
        by_split = {group.split: group.identity(self.root) for group in self.file_groups}
        identities = [by_split[None], by_split.get("val")]
        if "test" in by_split:
            identities.append(by_split["test"])
        return identities

    def recorded(self, name: str) -> Any:
        """Return a setting's value as fingerprints and runs record it."""
        value = super().recorded(name)
        return DTYPE if name == "dtype" and value is None else value

    def tokenizer_identity(self) -> Any:
        """Return the identity of the tokenizer that `tokenizer` names."""
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
                reader = TokenReader(raw, part.file, self.dtype or DTYPE)
                if not reader.has_header:
                    self._check_type(reader, part)
                if reader.fault:
                    raise UserError(reader.fault)
                while offset < reader.tokens:
                    split, end = self._end(part.file, offset, reader.tokens)
                    ids = reader.read(offset, end)
                    if ids.max() >= self.vocab_size:
                        raise self._above_vocabulary(int(ids.max()), reader, part)
                    offset = end
                    read += ids.nbytes
                    stored = ids.astype(token_dtype(self.vocab_size))
                    yield TokenBlock(Position(number, offset, read), split, stored)

    def _check_type(self, reader: TokenReader, part: TokenFile) -> None:
        """Raise a `UserError` if a file seems to be of another type, or warn, if one is set."""
        guess = guess_type(reader.sample(part), reader.dtype.itemsize)
        if guess is None:
            return
        path = part.file.path
        seems = f"{path} of the corpus: {guess.fact}, as in a file of {guess.name}"
        if self.dtype is None:
            raise UserError(
                f"{seems}; {self._remedy(guess, part)}; or, if it is of {DTYPE}, set "
                f"data.source.dtype={DTYPE}"
            )
        logger.warning("%s; it is read as data.source.dtype=%s", seems, self.dtype)

    def _above_vocabulary(self, token: int, reader: TokenReader, part: TokenFile) -> UserError:
        """Return the error for a token that isn't in the vocabulary."""
        remedy = "raise it, or change data.source.dtype"
        if not reader.has_header:
            sample = reader.sample(part)
            size = reader.dtype.itemsize
            guess = guess_type(sample, size) or fitting_type(sample, size, self.vocab_size)
            if guess:
                remedy = f"{guess.fact}, as in a file of {guess.name}: {self._remedy(guess, part)}"
        value = f"{token}"
        if token == np.iinfo(reader.dtype).max:
            value += f" (which is -1 in {reader.dtype.name.removeprefix('u')})"
            remedy = remedy.replace("raise it", "leave it out of the file")
        return UserError(
            f"{part.file.path} of the corpus has the token {value}, but data.source.vocab_size="
            f"{self.vocab_size}; {remedy}"
        )

    def _remedy(self, guess: Guess, part: TokenFile) -> str:
        """Return what to do with a file that seems to be of another type."""
        if guess.name in DTYPES:
            return f"set data.source.dtype={guess.name}"
        if not guess.code:
            return OTHER
        remedy = "use data=text, or " if guess.name.startswith("text") else ""
        if part.open is not open:  # on a server
            return f"{remedy}convert it to {' or '.join(DTYPES)}"
        return remedy + conversion(part.file.path, guess, self.vocab_size)

    def _end(self, file: File, offset: int, total: int) -> tuple[str, int]:
        """Return the split of token `offset`, and where the split changes or the stretch ends."""
        first = offset // STRETCH * STRETCH
        last = min(first + STRETCH, total)
        if file.split is not None:
            return file.split, last
        test = 0.0 if self.test_path is not None else self.test_fraction
        val = 0.0 if self.val_path is not None else self.val_fraction
        test_from = last - round((last - first) * test)
        val_from = test_from - round((last - first) * val)
        if offset < val_from:
            return "train", val_from
        if offset < test_from:
            return "val", test_from
        return "test", last


def _refuse_other(path: str) -> None:
    """Raise a `UserError` if the name of a file is not that of token files."""
    name = path.partition("?")[0].rpartition("/")[2].lower()  # a URL may end with a query
    if name.endswith(TOKENS):
        return
    remedy = ALONE
    for packed in PACKED:
        if name.endswith(packed):
            remedy = UNPACK
            name = name.removesuffix(packed)
    for ending, better in REMEDIES.items():
        if name.endswith(ending):
            remedy = better
    raise UserError(f"{path} is not a token file, whose name ends with {TOKENS}; {remedy}")


@dataclass
class RandomTokens(Source):
    """Uniformly random token ids, the same for the same size on every machine."""

    kind: ClassVar[str] = "synthetic"

    vocab_size: int = setting("size of the vocabulary", 50257, at_least=2, at_most=65536)
    tokens: int = setting("tokens in all, validation included", 4_194_304, at_least=1)

    tokenizer: str = setting(
        "what texts are written with: gpt2, file, folder, or hub name; numbers: as numbers",
        "numbers",
    )

    @property
    def size(self) -> int | None:
        """Bytes of all tokens."""
        return self.tokens * token_dtype(self.vocab_size).itemsize

    def identity(self) -> Any:
        """Return what determines the tokens in addition to the settings."""
        return SEED

    def tokenizer_identity(self) -> Any:
        """Return the size of the vocabulary, and the tokenizer if it isn't that of numbers."""
        name = None
        if self.tokenizer != NumberTokenizer.kind:
            name = tokenizer_choice.identity(self.tokenizer)
        return (name, self.vocab_size, None)

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that `tokenizer` names; raises a `UserError`."""
        return tokenizer_choice.of_size(self.tokenizer, self.vocab_size)

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield all of train, then of val, then of test.

        This scales raw draws of Philox itself, by the high half of `draw * vocab_size`, because
        NumPy promises stable raw draws but not a stable `integers()`. The bias is < 2**-16.
        """
        dtype = token_dtype(self.vocab_size)
        test = round(self.tokens * self.test_fraction)
        val = round(self.tokens * self.val_fraction)
        ends = {"train": self.tokens - val - test, "val": self.tokens - test, "test": self.tokens}
        done = start.offset
        philox = np.random.Philox(SEED)
        philox.random_raw(done, output=False)
        for split, end in ends.items():
            while done < end:
                draws = philox.random_raw(min(BLOCK >> 2, end - done)) >> np.uint64(32)
                ids = (draws * np.uint64(self.vocab_size)) >> np.uint64(32)
                done += ids.size
                yield TokenBlock(Position(0, done, done * dtype.itemsize), split, ids.astype(dtype))
