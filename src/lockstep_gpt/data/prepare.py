"""From a corpus to token files on disk, once: `prepare` turns the `data` settings into a folder.

A build happens in a hidden sibling folder that is renamed when it is whole and on the disk, so a
killed build leaves nothing that passes for finished, and of two builds at once one wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep_gpt.config import DataConfig, UserError
from lockstep_gpt.data.corpora import (
    SPLITS,
    RandomTokens,
    StandardLibrary,
    open_corpus,
    split_of,
)
from lockstep_gpt.data.shards import (
    FORMAT,
    Index,
    TokenWriter,
    check_sizes,
    load_index,
    write_index,
)
from lockstep_gpt.data.tokenizer import ByteTokenizer, NumberTokenizer, Tokenizer

logger = logging.getLogger(__name__)

# .NAME-FINGERPRINT.HOST.PID.RANDOM.tmp; anything else in the root is not ours to delete.
UNFINISHED = re.compile(r"\.\w+-[0-9a-f]{8}\.(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")
MINUTE, DAY = 60.0, 86_400.0


@dataclass(frozen=True)
class Recipe:
    """What decides the tokens of one prepared folder."""

    source: str
    val_fraction: float
    corpus: StandardLibrary | RandomTokens
    tokenizer: Tokenizer

    def fingerprint(self) -> str:
        """Return 64 hex digits that change with anything that decides the tokens."""
        corpus, tokenizer = self.corpus.identity(), self.tokenizer.to_dict()
        parts = [FORMAT, self.source, self.val_fraction, corpus, tokenizer]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def prepare(config: DataConfig) -> Path:
    """Return the folder with the token files of `config`, built first where it is not there yet.

    The folder is `<data.root>/<source>-<8 hex digits>`; the digits change with the corpus, the
    tokenizer and the settings that decide the tokens. A finished folder is only checked for size.

    Raises:
        UserError: the corpus is empty, the root is full or cannot be written, or a finished
            folder is not what its index says.
    """
    started = time.perf_counter()
    recipe = recipe_of(config)
    fingerprint = recipe.fingerprint()
    root = Path(config.root).expanduser()
    folder = root / f"{config.source}-{fingerprint[:8]}"
    remove_unfinished(root)
    try:
        reused = folder.is_dir()
        if not reused:
            _build(recipe, fingerprint, folder)
    except OSError as error:
        raise _refusal(root, error) from error
    index = load_index(folder)
    check_sizes(folder, index)
    if index.fingerprint != fingerprint:
        raise UserError(f"{folder} was prepared from other data; delete it and prepare it again")
    if not reused:
        seconds = time.perf_counter() - started
        logger.info("prepared %s in %.1f s", _contents(folder, index), seconds)
    return folder


def recipe_of(config: DataConfig) -> Recipe:
    """Return the corpus of `config` and its tokenizer: bytes for text, numbers for no text."""
    corpus = open_corpus(config)
    if isinstance(corpus, RandomTokens):
        return Recipe(
            config.source, config.val_fraction, corpus, NumberTokenizer(corpus.vocab_size)
        )
    return Recipe(config.source, config.val_fraction, corpus, ByteTokenizer())


def _build(recipe: Recipe, fingerprint: str, folder: Path) -> None:
    owner = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    unfinished = folder.with_name(f".{folder.name}.{owner}.tmp")
    try:
        unfinished.mkdir(parents=True)
        index = _write_splits(recipe, fingerprint, unfinished)
        _refuse_empty(index)
        write_index(unfinished, index)
        _sync(unfinished)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # there only if something went wrong


def _write_splits(recipe: Recipe, fingerprint: str, folder: Path) -> Index:
    tokenizer = recipe.tokenizer
    with ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            writer = TokenWriter(folder / f"{split}.bin", tokenizer.vocab_size)
            writers[split] = stack.enter_context(closing(writer))
        skipped = _write_tokens(recipe, writers)
    return Index(
        format=FORMAT,
        dtype=writers["train"].dtype.str,
        tokenizer=tokenizer.to_dict(),
        fingerprint=fingerprint,
        settings={"source": recipe.source, "val_fraction": recipe.val_fraction},
        skipped_documents=skipped,
        splits={split: writer.split() for split, writer in writers.items()},
    )


def _write_tokens(recipe: Recipe, writers: dict[str, TokenWriter]) -> int:
    """Write the whole corpus and return how many documents it skipped."""
    corpus, tokenizer = recipe.corpus, recipe.tokenizer
    if isinstance(corpus, RandomTokens):
        for split, ids in corpus.blocks(recipe.val_fraction):
            writers[split].append(ids)
        return 0
    assert tokenizer.end_of_text is not None
    end = np.array([tokenizer.end_of_text], dtype=writers["train"].dtype)
    for document in corpus.documents():
        writer = writers[split_of(document.name, recipe.val_fraction)]
        writer.append_document(tokenizer.encode(document.text), end, len(document.text))
    return corpus.skipped


def _refuse_empty(index: Index) -> None:
    for name, remedy in (("val", "raise it or take a larger corpus"), ("train", "lower it")):
        if not index.splits[name].tokens:
            raise UserError(
                f"data.val_fraction={index.settings['val_fraction']} leaves no tokens for the "
                f"{name} split of {index.settings['source']}; {remedy}"
            )


def _sync(folder: Path) -> None:
    """See the folder's own entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename a whole build into place, unless another process did so first."""
    try:
        unfinished.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    _sync(folder.parent)


def _refusal(root: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"data.root={root} has no space left for the prepared tokens; free some or set "
            "data.root to a folder on a larger disk"
        )
    return UserError(
        f"data.root={root} cannot be written ({error.strerror}); set data.root to a folder that "
        "you may write"
    )


def remove_unfinished(root: Path) -> None:
    """Remove what killed builds left in `root`; builds that may still be alive stay."""
    for path in root.glob(".*.tmp"):
        if (name := UNFINISHED.fullmatch(path.name)) and _abandoned(path, name):
            shutil.rmtree(path, ignore_errors=True)  # a courtesy: a leftover harms nobody


def _abandoned(path: Path, name: re.Match[str]) -> bool:
    """Tell whether a build is dead: its process is gone, or it wrote nothing for a day.

    A minute without writing is asked for in any case, because containers that share a host's name
    do not see each other's processes.
    """
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return False  # renamed or removed while we looked
    idle = time.time() - newest
    here = name["host"] == socket.gethostname()
    return idle > DAY or (idle > MINUTE and here and not _alive(int(name["pid"])))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _contents(folder: Path, index: Index) -> str:
    files = sum(split.documents for split in index.splits.values())
    size = sum(split.text_bytes for split in index.splits.values()) / 1e6
    skipped = f" ({index.skipped_documents} not UTF-8, left out)" * bool(index.skipped_documents)
    text = f": {files:,} files{skipped}, {size:.1f} MB" if files else ""
    counts = " and ".join(f"{split.tokens:,} {name}" for name, split in index.splits.items())
    return f"{index.settings['source']}{text} -> {folder} ({counts} tokens)"
