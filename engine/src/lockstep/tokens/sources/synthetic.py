"""`data=synthetic`: uniformly random tokens, for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lockstep.settings import setting
from lockstep.tokens import tokenizer_choice
from lockstep.tokens.sources.source import BLOCK, Position, Source, TokenBlock
from lockstep.tokens.tokenizer import NumberTokenizer, Tokenizer, token_dtype

SEED = 20_231  # fixed: `seed` determines the order of samples, not the samples


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
