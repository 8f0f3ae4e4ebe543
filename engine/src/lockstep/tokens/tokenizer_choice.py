"""The tokenizer that `tokenizer` names, and the one that a run or a folder has kept.

One of your own is a class in your project's package, which `tokenizer` names by its path.
`OwnTokenizer` in `tokenizer.py` says what it needs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from lockstep import project
from lockstep.errors import UserError
from lockstep.tokens.shards import hash_of_file
from lockstep.tokens.tokenizer import (
    END_OF_TEXT,
    BytePairTokenizer,
    ByteTokenizer,
    NumberTokenizer,
    OwnTokenizer,
    Tokenizer,
    byte_level,
    learn,
)
from lockstep.tokens.tokenizer_files import RANKS, from_ranks, hub_files, tokenizer_files

logger = logging.getLogger(__name__)

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # names of the end of text
# Two tokenizers that give the same ids for this text differ in the rarest words at most.
WORDS = "def f(x):\n    return 12345 + x  # naïve, isn't it?\n\tTokens tokenized: 漢字 😀 theory\n"
PROBE = f"\n\t a  é漢😀\0 {END_OF_TEXT}"  # a tokenizer that restores this restores any text
METHODS = ("train", "encode", "encode_documents", "decode", "to_dict")
# No part begins with an underscore: to import `__main__` would be to run it.
DOTTED = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")


def make_tokenizer(name: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that `tokenizer` names; `bpe` and your own train on `texts`.

    Raises:
        UserError: it can't be found or loaded, or isn't byte-level.
    """
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    if names_class(name):
        return train_tokenizer(name, vocab_size, texts)
    if name == BytePairTokenizer.kind:
        assert vocab_size is not None, "the settings have a default"
        tokenizer = learn(texts, vocab_size)
        learned = tokenizer.get_vocab_size()
        if learned < vocab_size:
            logger.warning(
                "data.source.vocab_size=%d is more than this corpus gives: no pair of tokens is "
                "left to join after %d, so the model's vocabulary is %d; add text, or, if the "
                "corpus has more MiB than data.source.tokenizer_mb, raise that",
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
    return is_class_path(name) and not tokenizer_files(name)


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
        return [name, source_hash(name), *sizes]
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
        case str(kind) if is_class_of_package(kind):
            return load_class(kind)(values)
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


def is_class_path(name: str) -> bool:
    """Return whether a name is the path of a class, of the project or of another package."""
    return DOTTED.fullmatch(name) is not None and not name.endswith((".json", ".tiktoken"))


def is_class_of_package(name: str) -> bool:
    """Return whether a name is the path of a class of the project's package."""
    package = project.package()
    return package is not None and is_class_path(name) and name.startswith(f"{package}.")


def load_class(name: str) -> type[OwnTokenizer]:
    """Return the class of this path.

    Only classes of the project's package are imported: the name may be from a file of someone else.

    Raises:
        UserError: there is no such class, or it lacks a method.
    """
    package = project.package()
    if package is None:
        raise UserError(
            f"tokenizer {name} is a class, which only a project's package may have; "
            "begin a lockstep.project.Project there"
        )
    remedy = f"name a class as {package}.module.Class"
    if not is_class_of_package(name):
        raise UserError(f"tokenizer {name} is outside of {package}; {remedy}")
    module, _, attribute = name.rpartition(".")
    try:
        named = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"tokenizer {name} cannot be imported ({error}); {remedy}") from error
    if not isinstance(named, type) or not named.__module__.startswith(f"{package}."):
        raise UserError(f"tokenizer {name} is not a class of {package}; {remedy}")
    lacking = [method for method in METHODS if not callable(getattr(named, method, None))]
    if lacking:
        raise UserError(
            f"tokenizer {name} lacks {', '.join(lacking)}; define what "
            "lockstep.tokens.tokenizer.OwnTokenizer describes"
        )
    return cast("type[OwnTokenizer]", named)


def train_tokenizer(name: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of this class, trained on `texts`.

    Raises:
        UserError: its values don't fit what the rest of the project needs.
    """
    tokenizer = load_class(name).train(iter(texts), vocab_size)
    size = getattr(tokenizer, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise UserError(f"tokenizer {name} has vocab_size={size}; set it to its number of ids")
    end = getattr(tokenizer, "end_of_text", None)
    if not isinstance(end, int) or not 0 <= end < size:
        raise UserError(
            f"tokenizer {name} has end_of_text={end}; set it to the id that ends a document, "
            f"from 0 to {size - 1}"
        )
    values: Any = tokenizer.to_dict()
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind != name:
        raise UserError(f"tokenizer {name} has kind={kind} in to_dict; set it to {name!r}")
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"tokenizer {name} cannot be saved ({error}); let to_dict return plain JSON values"
        ) from error
    return tokenizer


def source_hash(name: str) -> str:
    """Return a hash of the source of the class's module, which changes with the class.

    Raises:
        UserError: there is no such class.
    """
    file = sys.modules[load_class(name).__module__].__file__
    assert file is not None, "a module of a package is a file"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
