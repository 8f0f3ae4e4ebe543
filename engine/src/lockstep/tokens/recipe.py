"""A recipe: everything that decides the tokens of a prepared folder, and that folder's index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tqdm import tqdm

from lockstep.errors import UserError
from lockstep.settings import counted
from lockstep.tokens import shards
from lockstep.tokens.shards import Index, SplitWriter
from lockstep.tokens.sources.file_documents import ENDS
from lockstep.tokens.sources.source import SPLITS, Source
from lockstep.tokens.tokenizer import BytePairTokenizer, Tokenizer, token_dtype
from lockstep.tokens.tokenizer_files import FORMS
from lockstep.whole_files import replace_text

# Left out of the settings' digest: the tokenizer's identity replaces them.
APART = {"tokenizer", "vocab_size", "tokenizer_mb"}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the tokens of one prepared folder."""

    source: Source
    settings: dict[str, Any]  # those that decide tokens or files
    fingerprints: dict[str, str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, made only once because it may be learned."""
        return self.source.make_tokenizer()

    @property
    def fingerprint(self) -> str:
        """64 hex digits that change with anything that decides the tokens."""
        return _digest([shards.FORMAT, self.fingerprints])

    @property
    def folder(self) -> Path:
        """Where the tokens go."""
        return folder_of(replace(self.source, fingerprint=self.fingerprint))


@runtime_checkable
class BuildsItself(Protocol):
    """A source that writes its prepared folder itself, without blocks."""

    def build(self, recipe: Recipe, folder: Path) -> None:
        """Write the token files and their index into `folder`, which may have leftovers."""


def recipe_of(source: Source) -> Recipe:
    """Look at a source's corpus and digest what decides its tokens, or raise a `UserError`."""
    source = replace(source)  # takes a new look at its files
    settings = settings_of(source)
    parts = {"source": source.identity(), "tokenizer": source.tokenizer_identity()}
    digests = {name: _digest(part) for name, part in parts.items()}
    return Recipe(source, settings, {**digests, "settings": _digest(settings)})


def settings_of(source: Source) -> dict[str, Any]:
    """Return the settings that decide tokens or files."""
    defaults = {item.name: item.default for item in fields(source)}
    settings: dict[str, Any] = {"source": source.kind}
    for name in source.deciding():
        value = source.recorded(name)
        is_unused = name in source.added_later and value == defaults[name]
        if name not in APART and not is_unused:
            settings[name] = value
    return settings


def folder_of(source: Source) -> Path:
    """Return the folder of the tokens that a source's fingerprint names."""
    assert source.fingerprint is not None, "decided before"
    return Path(source.root).expanduser() / f"{source.kind}-{source.fingerprint[:8]}"


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def create_folder(recipe: Recipe, folder: Path) -> Index:
    """Create the folder, if it doesn't exist, and return its index, still without tokens.

    A tokenizer of the library `tokenizers` has a file of its own: `tokenizer=FOLDER` names it.
    """
    folder.mkdir(exist_ok=True)
    source = recipe.source
    tokenizer = recipe.tokenizer.to_dict()
    if tokenizer["kind"] == BytePairTokenizer.kind:
        replace_text(folder / FORMS[0][0], tokenizer["json"])
    settings = {**recipe.settings, "held_out": source.held_out}
    named = {split: name for split in SPLITS[1:] if (name := setting_of(source, split))}
    return Index(
        format=shards.FORMAT,
        dtype=token_dtype(recipe.tokenizer.vocab_size).newbyteorder("<").str,
        tokenizer=tokenizer,
        fingerprint=recipe.fingerprint,
        fingerprints=recipe.fingerprints,
        settings={**settings, "named": named} if named else settings,
        splits=dict.fromkeys(splits_of(recipe.source), shards.Split()),
    )


def setting_of(source: Source, split: str) -> str | None:
    """Return the setting that names a split's own files or rows, if it is set."""
    names = (f"{split}_path", f"{split}_split")
    return next((name for name in names if getattr(source, name, None) is not None), None)


def splits_of(source: Source) -> tuple[str, ...]:
    """Return the names of a source's splits."""
    return SPLITS if source.has_test else SPLITS[:2]


def progress(recipe: Recipe, done: int = 0) -> tqdm[Any]:
    """Return a progress bar that counts bytes and appears only in a terminal."""
    total = recipe.source.size
    return tqdm(
        desc="preparing", total=total, initial=done, unit="B", unit_scale=True, disable=None
    )


def refuse_empty_splits(recipe: Recipe, writers: Mapping[str, SplitWriter]) -> None:
    """Raise a `UserError` if a split has no tokens, or all have only ends of documents."""
    source = recipe.source
    if all(writer.tokens <= writer.documents for writer in writers.values()):  # only ends
        where = getattr(source, "path", None) or f"data={source.kind}"
        raise UserError(f"{where} is empty; give it text to train on")
    for name in reversed(list(writers)):
        if writers[name].tokens:
            continue
        named = setting_of(source, name)
        if name == "train" and setting_of(source, "val"):
            named = "path"
        if named:
            value = getattr(source, named)
            raise UserError(
                f"data.source.{named}={value} leaves no tokens for the {name} split; give more"
            )
        held_out = name
        remedy = "raise it or use a larger corpus"
        if name == "train":
            held_out = "val"
            remedy = "lower it"
        fraction = getattr(source, f"{held_out}_fraction")
        raise UserError(
            f"data.source.{held_out}_fraction={fraction} leaves no tokens for the {name} split of "
            f"{source.kind}; {remedy}"
        )


def describe(folder: Path, index: Index) -> str:
    """Describe the content of a prepared folder in one line."""
    held_out = index.settings.get("held_out")
    documents = [split.documents for split in index.splits.values()]
    count = sum(documents)
    if held_out == ENDS:  # each document is in several splits
        count = max(documents)
    text = ""
    if count:
        text = f": {counted(count, 'document')}"
        if index.invalid_documents:
            policy = index.settings.get("invalid_utf8", "replace")
            rule = f"data.source.invalid_utf8={policy}; fail says where"
            text += f" ({index.invalid_documents} not UTF-8: {rule})"
        size = sum(split.text_bytes for split in index.splits.values()) / 1e6
        if size:  # unknown of tokens made elsewhere
            text += f", {size:.1f} MB"
    tokens = " and ".join(f"{split.tokens:,} {name}" for name, split in index.splits.items())
    tokens += " tokens"
    if held_out:
        tokens += f"; val has {held_out}"
    return f"{index.settings['source']}{text} -> {folder} ({tokens})"
