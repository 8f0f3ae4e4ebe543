"""Text to token ids and back; data and models store their tokenizer as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError

Tokens = npt.NDArray[np.unsignedinteger[Any]]
END_OF_TEXT = "<|endoftext|>"
INCOMPLETE = "\ufffd"  # how a character of which bytes are missing is decoded
# With the usual patterns, a token always ends after a letter or digit that precedes a space. The
# second is nearly as good, for texts that don't have such a place.
CUTS = (re.compile(rb"[0-9A-Za-z](?=[ \n])"), re.compile(rb"[^ \n](?=[ \n])"))
# More such places, for texts without Latin letters: before a space that begins white space, and
# between a letter and punctuation. Not before an apostrophe: some patterns keep "don't" together.
SURE = re.compile(
    r"\S(?= )"
    r"|[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
    r"(?=[\n,;:()\u3001\u3002\u300c\u300d\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f])"
)
CONTROL = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")  # characters that a terminal may obey
PIECE = 1 << 16  # bytes of a long text that one thread tokenizes at a time
# A piece grows until it ends where a token does. One word of this size takes seconds and a GB.
LONGEST_PIECE = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that fits every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class Tokenizer(Protocol):
    """What the rest of the project needs from any tokenizer."""

    vocab_size: int  # the number of token ids
    end_of_text: int | None  # the id that ends a document; None if the data has no documents

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids of `text`, shape (tokens,)."""

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, each followed by the end of text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values from which `from_dict` rebuilds the tokenizer."""


class OwnTokenizer(Tokenizer, Protocol):
    """What a tokenizer of your own needs: `tokenizer` names its class.

    The `kind` in the values of `to_dict` is the class's path, such as
    `lockstep.tokens.characters.Characters`.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        """Rebuild the tokenizer from what `to_dict` returned."""

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int | None) -> Self:
        """Return a tokenizer that is made for `texts`.

        Args:
            texts: the beginning of the training documents.
            vocab_size: the source's setting; None if the user leaves it to the class.
        """


class ByteTokenizer:
    """The 256 byte values of UTF-8; byte 0 ends a document, so a text with one is rejected."""

    kind = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0

    def encode(self, text: str | bytes) -> Tokens:
        """Return one id per byte, uint8, shape (bytes,); lone surrogates become `?`."""
        if isinstance(text, str):
            text = text.encode("utf-8", errors="replace")
        return self.encode_documents([text])[:-1]

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, each followed by 0; reject a NUL."""
        together = b"\0".join([*texts, b""])
        if together.count(b"\0") > len(texts):
            text = next(text for text in texts if b"\0" in text)
            raise UserError(
                "a text contains a NUL byte, which marks the end of a document; remove it from "
                f"{text[:60]!r}"
            )
        return np.frombuffer(together, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; invalid UTF-8 becomes U+FFFD, and byte 0 becomes `<|endoftext|>`."""
        text = bytes(int(token) for token in ids)
        return text.replace(b"\0", END_OF_TEXT.encode()).decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the vocabulary size."""
        return {"kind": self.kind, "vocab_size": self.vocab_size}


class NumberTokenizer:
    """Writes ids as decimal numbers separated by spaces, for data that never was text."""

    kind = "numbers"
    end_of_text: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids in `text`, shape (numbers,), or raise a `UserError`."""
        words = text.split()
        for word in words:
            if not (word.isdigit() and word.isascii() and int(word) < self.vocab_size):
                raise UserError(
                    f"{word!r} is not a token of this model, which was trained on numbers; "
                    f"write whole numbers from 0 to {self.vocab_size - 1} with spaces between"
                )
        return np.array([int(word) for word in words], dtype=token_dtype(self.vocab_size))

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids in `texts` one after another, with nothing between them."""
        return self.encode(b" ".join(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(str(int(token)) for token in ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the vocabulary size."""
        return {"kind": self.kind, "vocab_size": self.vocab_size}


class BytePairTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019).

    `decode(encode(text)) == text` for any text; a literal "<|endoftext|>" in it doesn't end it.

    Args:
        values: what `to_dict` returned; `json` is what the library `tokenizers` writes.
    """

    kind = "bpe"

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.vocab_size: int = values["vocab_size"]
        self.end_of_text: int | None = values["end_of_text"]

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self._values["json"])
        tokenizer.encode_special_tokens = True  # a literal "<|endoftext|>" is text
        return tokenizer

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids of `text`; invalid UTF-8 becomes U+FFFD, lone surrogates `?`."""
        if isinstance(text, str):
            text = text.encode("utf-8", errors="replace")
        return self.encode_documents([text.decode("utf-8", errors="replace").encode()])[:-1]

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, each followed by the end of text."""
        documents = [[piece.decode() for piece in _pieces(text)] for text in texts]
        # The fast variant doesn't compute the tokens' positions in the text.
        encode = self._tokenizer.encode_batch_fast
        all_pieces = list(chain.from_iterable(documents))
        encoded = iter(encode(all_pieces, add_special_tokens=False))
        rows = [[*(next(encoded).ids for _ in pieces), [self.end_of_text]] for pieces in documents]
        ids = chain.from_iterable(chain.from_iterable(rows))
        return np.fromiter(ids, token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the whole tokenizer."""
        return self._values


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield a valid text in pieces whose tokens, one after another, are the text's tokens."""
    start = 0
    while start < len(text):
        end = start + _size_of_piece(text, start)
        yield text[start:end]
        start = end


def _size_of_piece(text: bytes, start: int) -> int:
    """Return the bytes of the piece that begins at `start`."""
    size = PIECE
    while size < len(text) - start:
        piece = text[start : start + size]
        end = find_sure_cut(piece)
        if end:
            return end
        if size >= LONGEST_PIECE:
            return find_cut(piece)
        size *= 2
    return len(text) - start


def find_cut(text: bytes) -> int:
    """Return where to cut a text that continues, so that both parts keep its tokens."""
    for pattern in CUTS:
        places = _ends_of_matches(pattern, text)
        if places:
            return places[-1]
    last = next((i for i in range(1, min(5, len(text))) if text[-i] & 0xC0 != 0x80), 0)
    return len(text) - last  # at the start of a character


def find_sure_cut(text: bytes) -> int:
    """Return the last place where a token of valid UTF-8 surely ends; 0 if there is none.

    The text continues, so its end is no such place.
    """
    places = _ends_of_matches(CUTS[0], text)
    if places:
        return places[-1]
    characters = text.decode("utf-8", "ignore")  # the last one may be incomplete
    places = [match.end() for match in SURE.finditer(characters)]
    if not places:
        return 0
    return len(characters[: places[-1]].encode())


def _ends_of_matches(pattern: re.Pattern[bytes], text: bytes) -> list[int]:
    """Return where the matches in the last 512 bytes of a text end."""
    return [match.end() for match in pattern.finditer(text, max(0, len(text) - 512))]


def learn(texts: Iterable[str], vocab_size: int) -> Any:
    """Return a tokenizer, of the library `tokenizers`, that is trained on `texts`."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level(model: Any) -> Any:
    """Return a tokenizer, of the library `tokenizers`, with GPT-2's way of splitting text."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def byte_characters() -> dict[int, str]:
    """Return byte -> its printable character in byte-level vocabularies (GPT-2's code)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    substitutes = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {byte: substitutes.get(byte, chr(byte)) for byte in range(256)}


class GrowingText:
    """The text of tokens that come one after another, in whole characters.

    Each time, all tokens are decoded: some tokenizers put spaces between the words of a list.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._shown = 0  # characters that were returned

    def add(self, ids: Iterable[int]) -> str:
        """Return what `ids` add to the text; bytes of an incomplete character are held back."""
        self.ids += ids
        return self._rest_of(self.tokenizer.decode(self.ids).rstrip(INCOMPLETE))

    def end(self) -> str:
        """Return the rest, in which a character that was not completed is U+FFFD."""
        return self._rest_of(self.tokenizer.decode(self.ids))

    def _rest_of(self, text: str) -> str:
        rest = text[self._shown :]
        self._shown = len(text)
        return rest


def printable(text: str) -> str:
    """Return `text` with its control characters escaped, because a terminal would obey them."""
    return CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"
