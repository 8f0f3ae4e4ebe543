"""Data that never was text: random tokens, and a tokenizer that writes ids as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data.tokenizer import Tokenizer, Tokens, token_dtype
from lockstep_gpt.extras.sources.blocks import (
    BLOCK,
    Blocks,
    InShards,
    Position,
    TokenBlock,
)

SEED = 20_231  # fixed: `seed` determines the order of samples, not the samples


@dataclass
class SyntheticData(InShards):
    """Uniformly random tokens, for benchmarks."""

    source: str = setting("where the text comes from", "synthetic", choices=("synthetic",))
    vocab_size: int = setting("size of the vocabulary", 50257, at_least=2, at_most=65536)
    tokens: int = setting("tokens in all, validation included", 4_194_304, at_least=1)


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


def from_dict(values: dict[str, Any]) -> NumberTokenizer:
    """Rebuild the tokenizer that `to_dict` described."""
    return NumberTokenizer(int(values["vocab_size"]))


class RandomTokens(Blocks):
    """Uniformly random token ids, the same for the same size on every machine."""

    def __init__(self, config: SyntheticData) -> None:
        self.vocab_size, self.tokens = config.vocab_size, config.tokens
        self.train = self.tokens - round(self.tokens * config.val_fraction)
        self.dtype = token_dtype(self.vocab_size)
        self.size: int | None = self.tokens * self.dtype.itemsize
        self.tokenizer_identity: Any = (None, self.vocab_size, None)

    def identity(self) -> Any:
        """Return what determines the tokens in addition to the settings."""
        return SEED

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of numbers."""
        return NumberTokenizer(self.vocab_size)

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield all of train, then all of val.

        This scales raw draws of Philox itself, by the high half of `draw * vocab_size`, because
        NumPy promises stable raw draws but not a stable `integers()`. The bias is < 2**-16.
        """
        done = start.offset
        philox = np.random.Philox(SEED)
        philox.random_raw(done, output=False)
        while done < self.tokens:
            split, end = ("train", self.train) if done < self.train else ("val", self.tokens)
            draws = philox.random_raw(min(BLOCK >> 2, end - done)) >> np.uint64(32)
            ids = (draws * np.uint64(self.vocab_size)) >> np.uint64(32)
            done += ids.size
            after = Position(0, done, done * self.dtype.itemsize)
            yield TokenBlock(after, split, ids.astype(self.dtype))
