"""Turns a corpus into token files on disk, once; one process builds, others wait for it.

It builds in a hidden sibling folder and renames that folder once it is complete and on disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lockstep_gpt.config import DataConfig, UserError, counted
from lockstep_gpt.data import corpora, shards
from lockstep_gpt.data.shards import Index, SplitWriter
from lockstep_gpt.data.tokenizer import Tokenizer, token_dtype
from lockstep_gpt.registry import addition, additions
from lockstep_gpt.whole_files import sync_folder

logger = logging.getLogger(__name__)

SPLITS = ("train", "val")
# Left out of the settings' digest: the tokenizer's identity replaces these; the last is a result.
APART = {"tokenizer", "vocab_size", "tokenizer_mb", "fingerprint"}
Writer = Callable[[Path, str, str], SplitWriter]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the tokens of one prepared folder."""

    config: DataConfig
    corpus: corpora.Corpus
    settings: dict[str, Any]  # those that decide tokens or files
    fingerprints: dict[str, str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, made only once because it may be learned."""
        return self.corpus.make_tokenizer()

    @property
    def fingerprint(self) -> str:
        """64 hex digits that change with anything that decides the tokens."""
        return _digest([shards.FORMAT, self.fingerprints])


def prepare(config: DataConfig, verify: bool = False) -> Path:
    """Return the folder with the token files of `config`; build it first if it doesn't exist.

    Checks the sizes of a finished folder's files and, with `verify`, their content. Doesn't open
    the corpus if `data.fingerprint` names an existing folder. Raises a `UserError` for anything
    that cannot be read, written, or trusted.
    """
    started, wanted, built = time.perf_counter(), config.fingerprint, False
    if wanted is None or not folder_of(config).is_dir():
        recipe = recipe_of(config)
        if wanted not in (None, recipe.fingerprint):
            raise UserError(
                f"{folder_of(config)} is missing, and the corpus now gives other tokens; put the "
                "folder back, or start a new run with data.fingerprint=null"
            )
        config = replace(config, fingerprint=recipe.fingerprint)
        folder = folder_of(config)
        try:
            built = not folder.is_dir() and _build(recipe, folder)
        except OSError as error:
            raise UserError(
                f"data.root={config.root} cannot be written ({error.strerror}); set data.root to a "
                "folder that you may write, on a disk with space"
            ) from error
    folder = opened(config)
    if built or verify:
        index = shards.load_index(folder)
        if verify:
            shards.check_content(folder, index)
        done = "prepared" if built else "verified"
        seconds = time.perf_counter() - started
        logger.info("%s %s in %.1f s", done, contents(folder, index), seconds)
    return folder


def folder_of(config: DataConfig) -> Path:
    """Return the folder of the tokens that `data.fingerprint` names."""
    assert config.fingerprint is not None, "decided before there are ranks"
    return Path(config.root).expanduser() / f"{config.source}-{config.fingerprint[:8]}"


def opened(config: DataConfig) -> Path:
    """Return the folder of `config`; raise a `UserError` if it is damaged or has other tokens."""
    folder = folder_of(config)
    index = shards.load_index(folder)
    shards.check_sizes(folder, index)
    if index.fingerprint != config.fingerprint:
        raise UserError(f"{folder} was prepared from other data; delete it and prepare it again")
    return folder


def recipe_of(config: DataConfig) -> Recipe:
    """Open the corpus of `config` and digest what decides its tokens, or raise a `UserError`."""
    if getattr(config, "path", None) == "":
        raise UserError(
            f"data.path is empty; set it to the data that data.source={config.source} should read"
        )
    corpus = corpora.corpus_of(config)
    apart = APART.union(*additions("NOT_TOKENS"))
    settings = {name: getattr(config, name) for name in config.names("kept") if name not in apart}
    parts = {"source": corpus.identity(), "tokenizer": corpus.tokenizer_identity}
    digests = {name: _digest(each) for name, each in {**parts, "settings": settings}.items()}
    return Recipe(config, corpus, settings, digests)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _build(recipe: Recipe, folder: Path) -> bool:
    """Build `folder` and return True, or wait until another process has, and return False."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return False
        (getattr(recipe.corpus, "build", None) or addition("BUILD") or write)(recipe, unfinished)
        if recipe_of(recipe.config).fingerprint != recipe.fingerprint:
            shutil.rmtree(unfinished)
            raise UserError(f"{folder.name}: the corpus changed meanwhile; prepare it again")
        sync_folder(unfinished)
        unfinished.rename(folder)
    sync_folder(folder.parent)
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock `path` exclusively; the system unlocks it however the process ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(recipe: Recipe, folder: Path, writer: Writer = SplitWriter) -> None:
    """Write the token files, then their index; leave nothing behind if that fails."""
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed build
    index, invalid = begin(recipe, folder), 0
    try:
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(closing(writer(folder, name, index.dtype)))
                for name in SPLITS
            }
            bar = stack.enter_context(progress(recipe))
            for split, texts, not_utf8 in recipe.corpus.stretches():
                size = sum(map(len, texts))
                ids = recipe.tokenizer.encode_documents(texts)
                writers[split].append(ids, len(texts), size)
                invalid += not_utf8
                bar.update(size)
            finish(recipe, folder, replace(index, invalid_documents=invalid), writers)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def begin(recipe: Recipe, folder: Path) -> Index:
    """Create the folder and return its index, still without tokens."""
    folder.mkdir()
    return Index(
        format=shards.FORMAT,
        dtype=token_dtype(recipe.tokenizer.vocab_size).newbyteorder("<").str,
        tokenizer=recipe.tokenizer.to_dict(),
        fingerprint=recipe.fingerprint,
        fingerprints=recipe.fingerprints,
        settings={**recipe.settings, "held_out": getattr(recipe.corpus, "held_out", None)},
        splits=dict.fromkeys(SPLITS, shards.Split()),
    )


def progress(recipe: Recipe, done: int = 0) -> tqdm[Any]:
    """Return a progress bar that counts bytes and appears only in a terminal."""
    total = recipe.corpus.size
    return tqdm(
        desc="preparing", total=total, initial=done, unit="B", unit_scale=True, disable=None
    )


def finish(recipe: Recipe, folder: Path, index: Index, writers: Mapping[str, SplitWriter]) -> None:
    """Write the index; raise a `UserError` if a split is empty."""
    if all(writer.tokens <= writer.documents for writer in writers.values()):  # only ends
        where = getattr(recipe.config, "path", None) or f"data.source={recipe.config.source}"
        raise UserError(f"{where} is empty; give it text to train on")
    for name, remedy in (("val", "raise it or use a larger corpus"), ("train", "lower it")):
        if not writers[name].tokens:
            raise UserError(
                f"data.val_fraction={recipe.config.val_fraction} leaves no tokens for the {name} "
                f"split of {recipe.config.source}; {remedy}"
            )
    splits = {name: writer.saved() for name, writer in writers.items()}
    shards.write_index(folder, replace(index, splits=splits))


def contents(folder: Path, index: Index) -> str:
    """Describe the content of a prepared folder in one line."""
    held, each = index.settings.get("held_out"), [s.documents for s in index.splits.values()]
    documents = max(each) if held == corpora.ENDS else sum(each)
    size = sum(split.text_bytes for split in index.splits.values()) / 1e6
    done = index.settings.get("invalid_utf8", "replace")
    invalid = f" ({index.invalid_documents} not UTF-8: {done})" * bool(index.invalid_documents)
    text = f": {counted(documents, 'document')}{invalid}, {size:.1f} MB" if documents else ""
    counts = " and ".join(f"{split.tokens:,} {name}" for name, split in index.splits.items())
    counts += f" tokens; val has {held}" if held else " tokens"
    return f"{index.settings['source']}{text} -> {folder} ({counts})"
