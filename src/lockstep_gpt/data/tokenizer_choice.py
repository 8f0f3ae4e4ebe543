"""The tokenizer that `data.tokenizer` names, and the one that a run or a folder has kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep_gpt.config import UserError
from lockstep_gpt.data.byte_pairs import BytePairTokenizer, byte_level, learn
from lockstep_gpt.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    NumberTokenizer,
    Tokenizer,
    library,
)

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # names of the end of text
PROBE = f"\n\t a  é漢😀\0 {END_OF_TEXT}"  # a tokenizer that restores this restores any text


def make_tokenizer(name: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names; `bpe` is trained on `texts`.

    Raises:
        UserError: it can't be loaded, isn't byte-level, or a library is missing.
    """
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    tokenizer = learn(texts, vocab_size) if name == BytePairTokenizer.kind else _loaded(name)
    vocabulary = tokenizer.get_vocab()
    values = {"kind": BytePairTokenizer.kind, "vocab_size": max(vocabulary.values()) + 1}
    ends = [vocabulary[end] for end in ENDS if end in vocabulary]
    made = BytePairTokenizer({**values, "end_of_text": [*ends, 0][0], "json": tokenizer.to_str()})
    if not ends or made.decode(made.encode(PROBE)) != PROBE:
        raise UserError(
            f"data.tokenizer={name} lacks {END_OF_TEXT} or does not restore every text; use "
            "a byte-level one, such as GPT-2's"
        )
    return made


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
            f"data.vocab_size={vocab_size} is not that of data.tokenizer={name}; set "
            f"data.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _loaded(name: str) -> Any:
    """Load a file, a folder with one or two files of the usual names, or a name on the hub."""
    lib = library("tokenizers", "bpe")
    files = [str(path) for path in tokenizer_files(name)]
    try:
        if len(files) == 2:
            return byte_level(lib.models.BPE.from_file(*files))
        if files:
            return lib.Tokenizer.from_file(*files)
        return lib.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library doesn't have its own error class
        raise UserError(
            f"data.tokenizer={name} cannot be loaded ({error}); give bytes, bpe, a tokenizer.json, "
            "a folder with one or with vocab.json and merges.txt, or a name on the hub"
        ) from error


def tokenizer_files(name: str) -> list[Path]:
    """Return the files that `data.tokenizer` names, if any."""
    path = Path(name).expanduser()
    for names in ((), ("tokenizer.json",), ("vocab.json", "merges.txt")):
        files = [path.joinpath(each) for each in names or ("",)]
        if all(file.is_file() for file in files):
            return files
    return []


def identity(name: str, *sizes: int | None) -> list[Any]:
    """Return what determines the tokens: hashes of files or the name; for `bpe`, also its sizes."""
    files = [hashlib.sha256(path.read_bytes()).hexdigest() for path in tokenizer_files(name)]
    return [files or name, *(sizes if name == BytePairTokenizer.kind else ())]


def from_dict(values: dict[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that `to_dict` described; raise a `UserError` for an unknown kind."""
    match values.get("kind"):
        case ByteTokenizer.kind:
            return ByteTokenizer()
        case BytePairTokenizer.kind:
            return BytePairTokenizer(values)
        case NumberTokenizer.kind:
            return NumberTokenizer(int(values["vocab_size"]))
        case kind:
            known = ", ".join(
                each.kind for each in (ByteTokenizer, BytePairTokenizer, NumberTokenizer)
            )
            raise UserError(
                f"tokenizer kind {kind!r} is not one of {known}; use the version of "
                "lockstep-gpt that wrote it, with its extras"
            )
