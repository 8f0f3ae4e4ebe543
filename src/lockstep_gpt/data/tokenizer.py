"""From text to token ids and back.

A tokenizer travels as a plain dictionary (`to_dict`, `from_dict`) in the prepared folder's index
and in checkpoints, so that a model can be used without the configuration it was trained with.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import PROGRAM, UserError

Tokens = npt.NDArray[np.unsignedinteger[Any]]

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # what vocabularies call it
PIECE = 1 << 16  # bytes of a long text that are tokenized at a time, by one thread
PROBE = f"\n\t a  é漢😀\0 {END_OF_TEXT}"  # a tokenizer that gives this back gives back any text
# Where tokens of the usual patterns end in any case: after a letter or digit, before a space. The
# second is nearly as good, for texts that have no such place.
CUTS = (re.compile(rb"[0-9A-Za-z](?=[ \n])"), re.compile(rb"[^ \n](?=[ \n])"))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class Tokenizer(Protocol):
    """What the rest of the project may ask of any tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document; None where the data has no documents."""

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids of `text`, shape (tokens,)."""

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, each with its end of text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` rebuilds the tokenizer from, as plain JSON values."""


class ByteTokenizer:
    """The 256 byte values of UTF-8; byte 0 ends a document.

    A NUL inside a text becomes a space, so that only true ends look like one and every byte
    still is one token. For text without NUL, `decode(encode(text)) == text`.
    """

    kind = "bytes"
    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str | bytes) -> Tokens:
        """Return one id per byte, uint8, shape (bytes,); lone surrogates become `?`."""
        if isinstance(text, str):
            text = text.encode("utf-8", errors="replace")
        return np.frombuffer(text.replace(b"\0", b" "), dtype=np.uint8)

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, a 0 after each."""
        together = b"\0".join([*texts, b""])
        if together.count(b"\0") > len(texts):
            together = b"\0".join([text.replace(b"\0", b" ") for text in texts] + [b""])
        return np.frombuffer(together, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; invalid UTF-8 shows as U+FFFD and byte 0 as `<|endoftext|>`."""
        text = bytes(int(token) for token in ids)
        return text.replace(b"\0", END_OF_TEXT.encode()).decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the size of the vocabulary."""
        return {"kind": self.kind, "vocab_size": self.vocab_size}


class NumberTokenizer:
    """Ids written as decimal numbers with spaces between, for data that never was text."""

    kind = "numbers"
    end_of_text = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids that `text` spells, shape (numbers,).

        Raises:
            UserError: a word is not a whole number from 0 to vocab_size - 1.
        """
        words = text.split()
        for word in words:
            if not (word.isdigit() and word.isascii() and int(word) < self.vocab_size):
                raise UserError(
                    f"{word!r} is not a token of this model, which was trained on numbers; "
                    f"write whole numbers from 0 to {self.vocab_size - 1} with spaces between"
                )
        return np.array([int(word) for word in words], dtype=token_dtype(self.vocab_size))

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids that `texts` spell one after another; nothing stands between."""
        return self.encode(b" ".join(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the numbers with spaces between."""
        return " ".join(str(int(token)) for token in ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the size of the vocabulary."""
        return {"kind": self.kind, "vocab_size": self.vocab_size}


class BytePairTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019).

    `decode(encode(text)) == text` for any text; one that spells the end of text is no end.

    Args:
        values: what `to_dict` returned; `json` holds what `tokenizers` writes.
    """

    kind = "bpe"

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.vocab_size: int = values["vocab_size"]
        self.end_of_text: int = values["end_of_text"]

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = library("tokenizers", "bpe").Tokenizer.from_str(self._values["json"])
        tokenizer.encode_special_tokens = True  # a text's own "<|endoftext|>" is text
        return tokenizer

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids of `text`; what is not UTF-8 becomes U+FFFD, lone surrogates `?`."""
        if isinstance(text, str):
            text = text.encode("utf-8", errors="replace")
        return self.encode_documents([text.decode("utf-8", errors="replace").encode()])[:-1]

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, each with its end of text."""
        pieces = [[piece.decode() for piece in _pieces(text)] for text in texts]
        # The fast variant leaves out where in the text each token stands.
        encode = self._tokenizer.encode_batch_fast
        encoded = iter(encode(list(chain.from_iterable(pieces)), add_special_tokens=False))
        rows = [[*(next(encoded).ids for _ in each), [self.end_of_text]] for each in pieces]
        ids = chain.from_iterable(chain.from_iterable(rows))
        return np.fromiter(ids, token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; what is not UTF-8 shows as U+FFFD."""
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the whole tokenizer."""
        return self._values


def _pieces(text: bytes) -> Iterator[bytes]:
    while len(text) > PIECE:
        end = cut(text[:PIECE])
        yield text[:end]
        text = text[end:]
    yield text


def cut(text: bytes) -> int:
    """Return where to end a part of a text that goes on, so that both parts keep its tokens."""
    for pattern in CUTS:
        for found in reversed(list(pattern.finditer(text, max(0, len(text) - 512)))):
            return found.end()
    last = next((i for i in range(1, min(5, len(text))) if text[-i] & 0xC0 != 0x80), 0)
    return len(text) - last  # before a character


def make_tokenizer(name: str, vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names; `bpe` is learnt from `texts`.

    Raises:
        UserError: it is none, or no byte-level one, or a library is missing.
    """
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    if name == NumberTokenizer.kind:
        return NumberTokenizer(vocab_size)
    tokenizer = _learnt(texts, vocab_size) if name == BytePairTokenizer.kind else _loaded(name)
    vocabulary = tokenizer.get_vocab()
    values = {"kind": BytePairTokenizer.kind, "vocab_size": max(vocabulary.values()) + 1}
    ends = [vocabulary[end] for end in ENDS if end in vocabulary]
    made = BytePairTokenizer({**values, "end_of_text": [*ends, 0][0], "json": tokenizer.to_str()})
    if not ends or made.decode(made.encode(PROBE)) != PROBE:
        raise UserError(
            f"data.tokenizer={name} has no {END_OF_TEXT} or does not give back every text; take "
            "a byte-level one, GPT-2's for example"
        )
    return made


def _learnt(texts: Iterable[str], vocab_size: int) -> Any:
    lib = library("tokenizers", "bpe")
    tokenizer = _byte_level(lib.models.BPE())
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(model: Any) -> Any:
    lib = library("tokenizers", "bpe")
    tokenizer = lib.Tokenizer(model)
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _loaded(name: str) -> Any:
    """Load a file, a folder with a file or two of the usual names, or what the hub has."""
    lib = library("tokenizers", "bpe")
    files = [str(path) for path in tokenizer_files(name)]
    try:
        if len(files) == 2:
            return _byte_level(lib.models.BPE.from_file(*files))
        if files:
            return lib.Tokenizer.from_file(*files)
        return lib.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library has no class of its own
        raise UserError(
            f"data.tokenizer={name} cannot be had ({error}); give bytes, bpe, a tokenizer.json, a "
            "folder with one or with vocab.json and merges.txt, or a name on the hub"
        ) from error


def tokenizer_files(name: str) -> list[Path]:
    """Return the files that `data.tokenizer` names; none where it names no file."""
    path = Path(name).expanduser()
    for names in ((), ("tokenizer.json",), ("vocab.json", "merges.txt")):
        files = [path.joinpath(each) for each in names or ("",)]
        if all(file.is_file() for file in files):
            return files
    return []


def library(name: str, extra: str) -> Any:
    """Import a library that not everyone needs.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is missing; pip install '{PROGRAM}[{extra}]'") from error


def from_dict(values: dict[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that `to_dict` described.

    Raises:
        UserError: a kind this version does not know.
    """
    kinds: dict[Any, Callable[[dict[str, Any]], Tokenizer]] = {
        ByteTokenizer.kind: lambda _: ByteTokenizer(),
        NumberTokenizer.kind: lambda values: NumberTokenizer(int(values["vocab_size"])),
        BytePairTokenizer.kind: BytePairTokenizer,
    }
    if (kind := values.get("kind")) not in kinds:
        raise UserError(
            f"tokenizer kind {kind!r} is not one of {', '.join(kinds)}; use the version of "
            "lockstep-gpt that wrote it"
        )
    return kinds[kind](values)
