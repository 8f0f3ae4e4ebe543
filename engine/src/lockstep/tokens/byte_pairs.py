"""Byte-pair encoding, and its training on a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from lockstep.tokens.tokenizer import (
    END_OF_TEXT,
    Tokens,
    find_cut,
    find_sure_cut,
    token_dtype,
)

PIECE = 1 << 16  # bytes of a long text that one thread tokenizes at a time
# A piece grows until it ends where a token does. One word of this size takes seconds and a GB.
LONGEST_PIECE = 1 << 22


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
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    substitutes = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {byte: substitutes.get(byte, chr(byte)) for byte in range(256)}
