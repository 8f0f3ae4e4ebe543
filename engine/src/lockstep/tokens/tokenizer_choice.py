"""The tokenizer that `tokenizer` names, and the one that a run or a folder has kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.tokens import own_tokenizer
from lockstep.tokens.byte_pairs import BytePairTokenizer, byte_level, learn
from lockstep.tokens.rank_files import from_ranks
from lockstep.tokens.sealed_json import hash_of_file
from lockstep.tokens.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    NumberTokenizer,
    Tokenizer,
)
from lockstep.tokens.tokenizer_files import RANKS, hub_files, tokenizer_files

logger = logging.getLogger(__name__)

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # names of the end of text
# Two tokenizers that give the same ids for this text differ in the rarest words at most.
WORDS = "def f(x):\n    return 12345 + x  # naïve, isn't it?\n\tTokens tokenized: 漢字 😀 theory\n"
PROBE = f"\n\t a  é漢😀\0 {END_OF_TEXT}"  # a tokenizer that restores this restores any text


def make_tokenizer(name: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that `tokenizer` names; `bpe` and your own train on `texts`.

    Raises:
        UserError: it can't be found or loaded, or isn't byte-level.
    """
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    if names_class(name):
        return own_tokenizer.train_tokenizer(name, vocab_size, texts)
    if name == BytePairTokenizer.kind:
        assert vocab_size is not None, "the settings have a default"
        tokenizer = learn(texts, vocab_size)
        learned = tokenizer.get_vocab_size()
        if learned < vocab_size:
            logger.warning(
                "data.source.vocab_size=%d is more than this corpus gives: no pair of tokens is "
                "left to join after %d, so the model's vocabulary is %d; add text, or raise "
                "data.source.tokenizer_mb",
                *(vocab_size, learned, learned),
            )
    else:
        tokenizer = _loaded(name)
    vocabulary = tokenizer.get_vocab()
    values = {"kind": BytePairTokenizer.kind, "vocab_size": max(vocabulary.values()) + 1}
    ends = [vocabulary[end] for end in ENDS if end in vocabulary]
    values |= {"end_of_text": [*ends, 0][0], "json": tokenizer.to_str()}
    result = BytePairTokenizer(values)
    try:
        restores = result.decode(result.encode(PROBE)) == PROBE
    except Exception as error:  # the library checks some of a file's values only here
        raise _unloadable(name, error) from error
    if not ends or not restores:
        raise UserError(
            f"tokenizer={name} lacks {END_OF_TEXT} or does not restore every text; use "
            "a byte-level one, such as GPT-2's"
        )
    return result


def of_size(name: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of data that are tokens already.

    Raises:
        UserError: its vocabulary has another size.
    """
    if name == NumberTokenizer.kind:
        return NumberTokenizer(vocab_size)
    tokenizer = make_tokenizer(name, None, ())
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"data.source.vocab_size={vocab_size} is not that of data.source.tokenizer={name}; set "
            f"data.source.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def names_class(name: str) -> bool:
    """Return whether `tokenizer` names a class, not a file."""
    return own_tokenizer.is_class_path(name) and not tokenizer_files(name)


def _loaded(name: str) -> Any:
    """Load a file, a folder with files of the usual names, GPT-2's files, or a name on the hub."""
    import tokenizers

    files = tokenizer_files(name) or hub_files(name)
    try:
        if files[0].suffix == RANKS:
            return from_ranks(files[0])
        if len(files) == 2:
            return byte_level(tokenizers.models.BPE.from_file(*map(str, files)))
        return tokenizers.Tokenizer.from_file(str(files[0]))
    except UserError:
        raise
    except Exception as error:  # the library doesn't have its own error class
        raise _unloadable(name, error) from error


def _unloadable(name: str, error: Exception) -> UserError:
    """Return the error for a tokenizer whose files can't be read, or are damaged."""
    file = next((path.name for path in tokenizer_files(name)), "its files")
    reason = " ".join(str(error).split())
    return UserError(
        f"tokenizer={name} cannot be loaded ({reason}); copy {file} again, or "
        "give bytes, bpe, gpt2, a tokenizer.json, a folder with one or with vocab.json and "
        "merges.txt, or a name on the hub"
    )


def identity(name: str, *sizes: int | None) -> list[Any]:
    """Return what determines the tokens: hashes of files, or the name.

    For `bpe` and for a class, which are trained, also the sizes; for a class, also its source.

    Raises:
        UserError: a file can't be read.
    """
    if names_class(name):
        return [name, own_tokenizer.source_hash(name), *sizes]
    try:
        files = [hash_of_file(path) for path in tokenizer_files(name)]
    except OSError as error:
        raise _unloadable(name, error) from error
    parts: list[Any] = [files or name]
    if name == BytePairTokenizer.kind:
        parts += sizes
    return parts


def from_dict(values: dict[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that `to_dict` described; raise a `UserError` for an unknown kind."""
    match values.get("kind"):
        case ByteTokenizer.kind:
            return ByteTokenizer()
        case BytePairTokenizer.kind:
            return BytePairTokenizer(values)
        case NumberTokenizer.kind:
            return NumberTokenizer(int(values["vocab_size"]))
        case str(kind) if own_tokenizer.is_class_of_package(kind):
            return own_tokenizer.load_class(kind)(values)
        case kind:
            classes = (ByteTokenizer, BytePairTokenizer, NumberTokenizer)
            known = ", ".join(tokenizer.kind for tokenizer in classes)
            raise UserError(
                f"tokenizer kind {kind!r} is not one of {known}, nor a class of this project; use "
                "the code that wrote it"
            )


def saved_tokenizer(path: Path, content: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a data module has saved, whatever its class is called.

    Args:
        path: of the checkpoint, for the error.
        content: of the checkpoint.

    Raises:
        UserError: it has none.
    """
    for state in content.values():
        if isinstance(state, dict) and {"tokenizer", "fingerprint"} <= state.keys():
            return from_dict(state["tokenizer"])
    raise UserError(f"{path} has no tokenizer; use a checkpoint of a run on tokens")


def encode_alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids for text; without text, whether equal."""
    if first.vocab_size != second.vocab_size:
        return False
    if first.end_of_text is None or second.end_of_text is None:
        return first.to_dict() == second.to_dict()
    return bool(first.encode(WORDS).tolist() == second.encode(WORDS).tolist())
