"""GPT-2's tokenizer from a rank file, the format of the library tiktoken.

Each line is a token in base64 and its id. A merge is what makes a token of two others; the file
doesn't say which two, but they follow from the ids: the pair with the lowest id merges first.
"""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.tokens.byte_pairs import byte_characters, byte_level
from lockstep.tokens.tokenizer import END_OF_TEXT

SIZE = 50_256  # of GPT-2, whose end of text has the next id


def from_ranks(path: Path) -> Any:
    """Return a tokenizer, of the library `tokenizers`, with the tokens of a rank file.

    Raises:
        UserError: it isn't GPT-2's. Such files don't say how a text is split into words, nor which
            token ends it.
        ValueError: it is damaged.
    """
    from tokenizers import models

    ranks = _ranks(path)
    if len(ranks) != SIZE or [*ranks.values()] != [*range(SIZE)]:
        raise UserError(
            f"tokenizer={path} has {len(ranks):,} tokens; only GPT-2's .tiktoken file "
            f"({SIZE:,} tokens) can be read; give this tokenizer's tokenizer.json"
        )
    characters = byte_characters()
    words = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    vocabulary[END_OF_TEXT] = SIZE
    merges = []
    for token in ranks:
        if len(token) > 1:
            left = _left_part(token, ranks)
            merges.append((words[token[:left]], words[token[left:]]))
    return byte_level(models.BPE(vocab=vocabulary, merges=merges))


def _ranks(path: Path) -> dict[bytes, int]:
    """Return token -> id."""
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[b64decode(token, validate=True)] = int(rank)
    return ranks


def _left_part(token: bytes, ranks: dict[bytes, int]) -> int:
    """Return the bytes of the first of the two tokens that make this one.

    Raises:
        ValueError: no two tokens do.
    """
    ends: list[int] = [*range(1, len(token) + 1)]  # of the parts, which are single bytes at first
    while len(ends) > 2:
        starts = [0, *ends]
        pairs = [token[starts[place] : ends[place + 1]] for place in range(len(ends) - 1)]
        merged = [ranks.get(pair, SIZE) for pair in pairs]
        if min(merged) >= ranks[token]:
            raise ValueError(f"{token!r} isn't a merge of two tokens")
        del ends[merged.index(min(merged))]
    if token[: ends[0]] not in ranks or token[ends[0] :] not in ranks:
        raise ValueError(f"{token!r} isn't a merge of two tokens")
    return ends[0]
