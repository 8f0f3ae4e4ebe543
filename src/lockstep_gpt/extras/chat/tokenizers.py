"""The tokenizer of the model to fine-tune, with special tokens for a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep_gpt.data import prepare, shards
from lockstep_gpt.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer
from lockstep_gpt.data.tokenizer_choice import from_dict
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.template import (
    BEGIN_OF_MESSAGE,
    END_OF_MESSAGE,
    OURS,
    markers_of,
)
from lockstep_gpt.run.checkpoint import find_checkpoint, read_checkpoint
from lockstep_gpt.run.directory import RunDirectory

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


def chat_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names; special tokens that it lacks are added.

    Raises:
        UserError: there is none of this name, or it can't have special tokens.
    """
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    values = _values(Path(name).expanduser(), f"data.tokenizer={name}")
    tokenizer = from_dict(values)
    markers = {*markers_of(tokenizer)}
    if markers >= {*OURS} or markers >= {BEGIN_OF_MESSAGE, END_OF_MESSAGE}:
        return tokenizer
    if "json" not in values or tokenizer.end_of_text is None:
        raise UserError(
            f"data.tokenizer={name} is of kind {values['kind']}, which is not for text; choose a "
            "model that was trained on text"
        )
    return from_dict(_with_markers(values))


def _values(path: Path, setting: str) -> dict[str, Any]:
    """Return the plain values of the tokenizer of a run, of a checkpoint, or of a folder."""
    file = path if path.suffix == ".json" else path / "tokenizer.json"
    if file.is_file():
        return _from_file(file, setting)
    if (path / "config.yaml").is_file():
        try:  # without torch, which this process would load only for this
            folder = prepare.opened(RunDirectory(path).load().data)
            return shards.load_index(folder).tokenizer
        except (UserError, AssertionError):  # the data is elsewhere by now
            pass
    if path.is_file() or (path / "checkpoints").is_dir():
        return dict(read_checkpoint(find_checkpoint(path))["tokenizer"])
    raise UserError(
        f"{setting} is not bytes, a run, a checkpoint, or a folder with tokenizer.json; give one"
    )


def _from_file(path: Path, setting: str) -> dict[str, Any]:
    """Return the values of a byte-level BPE; one without merges is our tokenizer of bytes."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        model = content["model"]
        added = content["added_tokens"]
        words = model["vocab"] | {token["content"]: token["id"] for token in added}
        size = max(words.values()) + 1
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{setting}: {path} cannot be read ({error}); copy it again") from None
    if size == ByteTokenizer.vocab_size and not model.get("merges"):
        return ByteTokenizer().to_dict()
    ends = [words[end] for end in ENDS if end in words]
    if not ends:
        raise UserError(f"{setting} has no {END_OF_TEXT}; choose a tokenizer with an end of text")
    try:
        saved = _as_saved(text)
    except Exception as error:  # the library doesn't have its own error class
        raise UserError(f"{setting}: {path} is damaged ({error}); copy it again") from None
    return {"kind": "bpe", "vocab_size": size, "end_of_text": ends[0], "json": saved}


def _as_saved(text: str) -> str:
    """Return a tokenizer as its library writes it: the same for every source of data."""
    from tokenizers import Tokenizer as Library

    saved: str = Library.from_str(text).to_str()
    return saved


def _with_markers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the tokenizer with our markers as its last ids."""
    content = json.loads(values["json"])
    size = values["vocab_size"]
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": size + place, "content": marker, **form, "special": True}
        for place, marker in enumerate(OURS)
    ]
    text = _as_saved(json.dumps(content, ensure_ascii=False))
    return {**values, "vocab_size": size + len(OURS), "json": text}
