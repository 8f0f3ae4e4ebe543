"""A mixture's prepared folder: links to the token files of its sources, and their index.

The files stay when a source's own folder is deleted or its corpus grows: a run that uses the
mixture keeps the state of every corpus that it started with.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from lockstep.errors import UserError
from lockstep.file_systems import lacks_links
from lockstep.tokens import shards
from lockstep.tokens.prepare import prepare, unwritable
from lockstep.tokens.recipe import Recipe, create_folder
from lockstep.tokens.shards import Index, Split
from lockstep.tokens.sources.file_documents import ENDS
from lockstep.tokens.sources.source import Source
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.tokenizer_choice import from_dict
from lockstep.whole_files import replace_text, sync


class PreparedSources:
    """The sources of a mixture, prepared; `UserError` if one can't be, or they don't fit.

    Args:
        sources: by name.
        tokenizer_from: the source whose tokenizer all use; None: they must have equal ones.
    """

    def __init__(self, sources: Mapping[str, Source], tokenizer_from: str | None) -> None:
        configs = dict(sources)
        if tokenizer_from is not None:
            first = _prepare(tokenizer_from, sources[tokenizer_from])
            values = shards.load_index(first).tokenizer
            for name, source in sources.items():
                if name != tokenizer_from:
                    configs[name] = _with_tokenizer(source, values)
        self.folders = {name: _prepare(name, config) for name, config in configs.items()}
        self.indexes = {name: shards.load_index(path) for name, path in self.folders.items()}
        self._check_folders()
        self._check_tokenizers()

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of all sources."""
        return from_dict(next(iter(self.indexes.values())).tokenizer)

    def link(self, recipe: Recipe, folder: Path) -> None:
        """Link the token files of all sources into a folder, and write their index.

        Each source's tokens are splits of their own, such as `code/train`; `train` and `val` count
        those of all sources.
        """
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed build
        index = create_folder(recipe, folder)
        index = replace(index, tokenizer=next(iter(self.indexes.values())).tokenizer)
        splits = {name: _sum(self.indexes.values(), name) for name in index.splits}
        for name, source_index in self.indexes.items():
            for split, content in source_index.splits.items():
                files = [replace(shard, file=f"{name}-{shard.file}") for shard in content.shards]
                splits[f"{name}/{split}"] = Split(content.tokens, shards=files)
                for old, new in zip(content.shards, files, strict=True):
                    _link(self.folders[name] / old.file, folder / new.file)
        places = {name: folder.name for name, folder in self.folders.items()}
        index = replace(index, settings={**index.settings, "sources": places}, splits=splits)
        shards.write_index(folder, index)

    def _check_folders(self) -> None:
        seen: dict[Path, str] = {}
        for name, folder in self.folders.items():
            other = seen.setdefault(folder, name)
            if other != name:
                raise UserError(
                    f"data.source.sources.{other} and data.source.sources.{name} are the same "
                    f"tokens ({folder}); remove one of them"
                )

    def _check_tokenizers(self) -> None:
        (first, expected), *others = self.indexes.items()
        for name, index in others:
            if index.tokenizer != expected.tokenizer:
                raise UserError(
                    f"data.source.sources.{first} and data.source.sources.{name} have different "
                    "tokenizers "
                    f"({_kind(expected)} and {_kind(index)}), and a model has one; set the same "
                    f"data.source.sources.NAME.tokenizer, or data.source.tokenizer_from={first}"
                )


def _prepare(name: str, config: Source) -> Path:
    with renamed(name, type(config)):
        return prepare(config)


def _kind(index: Index) -> str:
    return f"{index.tokenizer['kind']} of {index.tokenizer['vocab_size']:,} ids"


def _with_tokenizer(config: Any, values: dict[str, Any]) -> Source:
    """Return a source's settings with the tokenizer of another, if they can name one."""
    name = values["kind"]
    if "json" in values:
        digest = hashlib.sha256(values["json"].encode()).hexdigest()[:8]
        path = Path(config.root).expanduser() / "tokenizers" / f"{digest}.json"
        if not _has(path, values["json"].encode()):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, values["json"])
            except OSError as error:
                raise unwritable(config.root, error) from error
        name = str(path)
    defaults = {item.name: item.default for item in fields(config)}
    # Only token files say how many ids there are; text has as many as its tokenizer.
    size = values["vocab_size"] if defaults.get("vocab_size") else None
    settings = {"tokenizer": name, "vocab_size": size}
    changes = {name: value for name, value in settings.items() if name in defaults}
    return cast(Source, replace(config, **changes))


def _has(path: Path, content: bytes) -> bool:
    """Return whether a file has this content: an earlier copy may be damaged."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _sum(indexes: Collection[Index], name: str) -> Split:
    """Add up a split of all sources; a file with an end held out is a document of `train` only."""
    tokens = 0
    documents = 0
    text_bytes = 0
    for index in indexes:
        if name not in index.splits:
            continue
        split = index.splits[name]
        tokens += split.tokens
        text_bytes += split.text_bytes
        if name == "train" or index.settings.get("held_out") != ENDS:
            documents += split.documents
    return Split(tokens, documents, text_bytes)


def _link(old: Path, new: Path) -> None:
    """Link a file; where there are no hard links, by its name; where there are none, copy it."""
    by_name = partial(new.symlink_to, Path("..", old.parent.name, old.name))
    for link in (partial(os.link, old, new), by_name):
        try:
            link()
        except OSError as error:
            if not lacks_links(error):
                raise
        else:
            return
    with old.open("rb") as source, new.open("wb") as copy:
        shutil.copyfileobj(source, copy)
        copy.flush()
        sync(copy.fileno())


@contextmanager
def renamed(name: str, source_class: type[Source]) -> Iterator[None]:
    """Rename `data.source.SETTING` to `data.source.sources.NAME.SETTING` in a `UserError`.

    Args:
        name: the source's name.
        source_class: its class.
    """
    try:
        yield
    except UserError as error:
        known = "|".join(
            sorted((item.name for item in fields(source_class)), key=len, reverse=True)
        )
        place = rf"data.source.sources.{name}.\1"
        raise UserError(re.sub(rf"\bdata\.source\.({known})\b", place, str(error))) from error
