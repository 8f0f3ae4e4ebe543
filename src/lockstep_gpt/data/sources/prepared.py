"""`data=prepared`: a folder that `prepare` has made, at a URL; its files are copied to this disk.

Training reads tokens in random order, so all files are here before it starts. Several are fetched
at once. A file that is here in part is continued; each must match its SHA-256.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from lockstep_gpt.data import shards
from lockstep_gpt.data.data_settings import data_choices
from lockstep_gpt.data.recipe import Recipe, create_folder, progress
from lockstep_gpt.data.sealed_json import hash_of_file
from lockstep_gpt.data.shards import INDEX, Index, Shard, Split
from lockstep_gpt.data.sources.remote_files import find_file_system, open_remote
from lockstep_gpt.data.sources.source import Position, Source, TokenBlock, reading
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.data.tokenizer_choice import from_dict
from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import setting

AT_ONCE = 4  # files
PIECE = 1 << 23  # bytes, written together
OF_TEXT = ("val_fraction", "test_fraction", "shard_mb")  # settings that were used long ago
AGAIN = "copy the folder there again"


@dataclass
class PreparedFolder(Source):
    """A prepared folder at a URL or a path."""

    kind: ClassVar[str] = "prepared"

    path: str = setting("URL or path of a prepared folder", "", on_resume="machine")

    def __post_init__(self) -> None:
        """Also refuse what was decided when the folder was prepared."""
        super().__post_init__()
        for item in fields(self):
            if item.name in OF_TEXT and getattr(self, item.name) != item.default:
                self.refuse(item.name, "has no effect on tokens that are prepared; remove it")

    @property
    def size(self) -> int | None:
        """The bytes of all token files."""
        return sum(shard.tokens for shard in self.index.shards) * self._itemsize

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return "test" in self.index.splits

    @cached_property
    def index(self) -> Index:
        """The index at the URL.

        Raises:
            UserError: it is missing, damaged, or of data that are more than tokens.
        """
        if not self.path:
            raise UserError("data.path is empty; set it to the URL or path of a prepared folder")
        url = self._url(INDEX)
        with reading(url):
            system, place = find_file_system(url, "data.path")
            with open_remote(system, place) as file:
                content = file.read()
        try:
            index = shards.parse_index(content)
        except ValueError as error:
            raise UserError(f"{url} {error}; {AGAIN}, or name another one") from error
        self._refuse_what_is_lost(url, index)
        return index

    def identity(self) -> Any:
        """Return the fingerprint of the folder, and the SHA-256 of its files."""
        return [self.index.fingerprint, [shard.sha256 for shard in self.index.shards]]

    def tokenizer_identity(self) -> Any:
        """Return what the folder's index says of its tokenizer."""
        return self.index.tokenizer

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return from_dict(self.index.tokenizer)

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield nothing: the token files are copied whole."""
        yield from ()

    def build(self, recipe: Recipe, folder: Path) -> None:
        """Fetch what is not in the folder yet, and write its index.

        Raises:
            UserError: a file can't be read, or doesn't match its SHA-256.
        """
        index = create_folder(recipe, folder)
        stop = Event()
        with progress(recipe) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
            fetched = [
                pool.submit(self._fetch, shard, folder, bar, stop) for shard in self.index.shards
            ]
            try:
                for result in as_completed(fetched):
                    result.result()
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
        splits = {name: _without_hashes(split) for name, split in self.index.splits.items()}
        settings = {
            "source": self.kind,
            "prepared": self.index.settings,
            "held_out": self.index.settings.get("held_out"),
        }
        index = replace(
            index,
            dtype=self.index.dtype,
            settings=settings,
            splits=splits,
            invalid_documents=self.index.invalid_documents,
        )
        shards.write_index(folder, index)

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.index.dtype).itemsize

    def _url(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def _fetch(self, shard: Shard, folder: Path, bar: tqdm[Any], stop: Event) -> None:
        """Fetch a file, or the rest of it; once more from its start if it isn't what it should."""
        path = folder / shard.file
        for _ in range(2):
            self._fetch_rest(shard, path, bar, stop)
            if hash_of_file(path) == shard.sha256:
                return
            path.unlink()
        raise UserError(f"{self._url(shard.file)} does not match its SHA-256; {AGAIN}")

    def _fetch_rest(self, shard: Shard, path: Path, bar: tqdm[Any], stop: Event) -> None:
        size = shard.tokens * self._itemsize
        url = self._url(shard.file)
        with path.open("ab") as file:
            done = file.tell()
            bar.update(min(done, size))
            if done >= size:
                return
            with reading(url):
                system, place = find_file_system(url, "data.path")
                raw = open_remote(system, place)
            with raw:
                raw.seek(done)
                while done < size:
                    if stop.is_set():
                        raise CancelledError
                    with reading(url):
                        data = raw.read(min(PIECE, size - done))
                    if not data:
                        raise UserError(f"{url} has {done:,} bytes, not {size:,}; {AGAIN}")
                    file.write(data)
                    done += len(data)
                    bar.update(len(data))
            file.flush()
            os.fsync(file.fileno())

    def _refuse_what_is_lost(self, url: str, index: Index) -> None:
        """Raise a `UserError` if the tokens alone are another experiment than the folder's."""
        for shard in index.shards:
            if not re.fullmatch(r"[\w-]+\.bin", shard.file):
                raise UserError(f"{url} names the file {shard.file!r}; {AGAIN}")
        kind = index.settings.get("source")
        if kind == self.kind:
            kind = index.settings.get("prepared", {}).get("source")
        if any("/" in name for name in index.splits):
            raise UserError(
                f"{url} holds a mixture; copy its sources' folders, and mix them: "
                "data.sources.NAME=prepared data.sources.NAME.path=URL"
            )
        sources = {choice.kind: choice for choice in data_choices().values()}
        made_by = sources.get(str(kind))
        if made_by is None:
            raise UserError(
                f"{url} was prepared by data={kind}, which this project lacks; add it, or choose "
                "another folder"
            )


def _without_hashes(split: Split) -> Split:
    """Return a split without the hashes of its documents: only a build from text reads them."""
    return replace(split, hashes_sha256="")
