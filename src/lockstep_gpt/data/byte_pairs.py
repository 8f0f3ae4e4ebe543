"""Byte-pair encoding: trained on a corpus, or loaded from a file, a folder, or the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_gpt.config import UserError
from lockstep_gpt.data.corpora import Corpus
from lockstep_gpt.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    Tokens,
    cut,
    library,
    token_dtype,
)

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # names of the end of text
PIECE = 1 << 16  # bytes of a long text that one thread tokenizes at a time
PROBE = f"\n\t a  é漢😀\0 {END_OF_TEXT}"  # a tokenizer that restores this restores any text


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
        tokenizer = library("tokenizers", "bpe").Tokenizer.from_str(self._values["json"])
        tokenizer.encode_special_tokens = True  # a literal "<|endoftext|>" is text
        return tokenizer

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids of `text`; invalid UTF-8 becomes U+FFFD, lone surrogates `?`."""
        if isinstance(text, str):
            text = text.encode("utf-8", errors="replace")
        return self.encode_documents([text.decode("utf-8", errors="replace").encode()])[:-1]

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of valid texts one after another, each followed by the end of text."""
        pieces = [[piece.decode() for piece in _pieces(text)] for text in texts]
        # The fast variant doesn't compute the tokens' positions in the text.
        encode = self._tokenizer.encode_batch_fast
        encoded = iter(encode(list(chain.from_iterable(pieces)), add_special_tokens=False))
        rows = [[*(next(encoded).ids for _ in each), [self.end_of_text]] for each in pieces]
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
    while len(text) > PIECE:
        end = cut(text[:PIECE])
        yield text[:end]
        text = text[end:]
    yield text


def make_tokenizer(name: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names; `bpe` is trained on `texts`.

    Raises:
        UserError: it can't be loaded, isn't byte-level, or a library is missing.
    """
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    tokenizer = _learnt(texts, vocab_size) if name == BytePairTokenizer.kind else _loaded(name)
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


def _learnt(texts: Iterable[str], vocab_size: int | None) -> Any:
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
    """Load a file, a folder with one or two files of the usual names, or a name on the hub."""
    lib = library("tokenizers", "bpe")
    files = [str(path) for path in tokenizer_files(name)]
    try:
        if len(files) == 2:
            return _byte_level(lib.models.BPE.from_file(*files))
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


def training_texts(corpus: Corpus, size: int) -> Iterator[str]:
    """Yield the first `size` bytes of the training documents, to train `bpe` on."""
    for stretch in corpus.stretches():
        for text in stretch.texts if stretch.split == "train" else ():
            if size <= 0:
                return
            yield text[:size].decode("utf-8", "ignore")
            size -= len(text)
