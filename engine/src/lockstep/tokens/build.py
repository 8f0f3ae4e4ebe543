"""Builds a prepared folder block by block, and resumes a build that was killed.

Each time a token file is full, the index in the folder records the progress.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lockstep.errors import RunError, UserError
from lockstep.tokens import shards
from lockstep.tokens.encoding import BLOCKS, encode_corpus
from lockstep.tokens.recipe import (
    Recipe,
    create_folder,
    progress,
    refuse_empty_splits,
    splits_of,
)
from lockstep.tokens.shards import INDEX, Index
from lockstep.tokens.sources.source import Position
from lockstep.tokens.split_writer import SplitWriter

logger = logging.getLogger(__name__)

WEEK = 604_800.0  # seconds


def write(recipe: Recipe, folder: Path) -> None:
    """Write the rest of the folder; if that fails after a full token file, the next call resumes.

    Raises:
        RunError: the disk is full.
        UserError: a process was killed, or a split is empty.
    """
    _remove_abandoned(folder.parent)
    try:
        _write(recipe, folder)
    except BaseException as error:
        splits = splits_of(recipe.source)
        if len([*folder.glob("*.bin")]) <= len(splits):  # no token file is full yet
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"data.root={recipe.source.root} has no space left for the prepared tokens; free "
                "some (finished work is kept), or set data.root to a folder on a larger disk"
            ) from error
        raise


def _write(recipe: Recipe, folder: Path) -> None:
    """Write the rest of the token files, then the final index."""
    index = _resume_or_start(recipe, folder)
    limit = recipe.source.shard_mb << 20
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(closing(SplitWriter(folder, name, index.dtype, limit, split)))
            for name, split in index.splits.items()
        }
        bar = stack.enter_context(progress(recipe, index.position[2]))
        full_at_save = [len(writer.full) for writer in writers.values()]
        for after, invalid, splits in encode_corpus(recipe.source, folder, index.position):
            for split, ids, documents, size in splits:
                writers[split].append(ids, documents, size)
            invalid += index.invalid_documents
            index = replace(index, position=[*after], invalid_documents=invalid)
            full = [len(writer.full) for writer in writers.values()]
            if full != full_at_save:
                full_at_save = full
                _save(folder, index, writers)
            _show(bar, after.read, writers)
        if not any(writer.tokens for writer in writers.values()):
            kind = recipe.source.kind
            raise UserError(f"data={kind} contains no text; choose a corpus that does")
        refuse_empty_splits(recipe, writers)
        _save(folder, index, writers)


def _save(folder: Path, index: Index, writers: dict[str, SplitWriter]) -> None:
    """Write the index, once everything that it names is on disk."""
    splits = {name: writer.saved() for name, writer in writers.items()}
    shards.write_index(folder, replace(index, splits=splits))


def _resume_or_start(recipe: Recipe, folder: Path) -> Index:
    """Return the index of a killed build, or of a new one."""
    for path in folder.glob(f"{BLOCKS}*"):  # of killed processes
        shutil.rmtree(path, ignore_errors=True)
    if (folder / INDEX).exists():
        try:
            index = shards.load_index(folder)
            if index.fingerprint == recipe.fingerprint:
                cut_to_index(folder, index)
                shards.check_content(folder, index)
                done = sum(split.tokens for split in index.splits.values())
                logger.info("continuing after %s tokens", f"{done:,}")
                return index
        except UserError as error:
            logger.warning("%s; starting over", str(error).split(";")[0])
    shutil.rmtree(folder, ignore_errors=True)
    index = replace(create_folder(recipe, folder), position=[*Position()])
    shards.write_index(folder, index)
    return index


def _show(bar: tqdm[Any], read: int, writers: dict[str, SplitWriter]) -> None:
    documents = sum(writer.documents for writer in writers.values())
    tokens = sum(writer.tokens for writer in writers.values())
    bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
    bar.update(read - bar.n)


def _remove_abandoned(root: Path) -> None:
    """Remove killed builds that weren't resumed for a week."""
    for path in root.glob(".*-????????.unfinished"):
        if time.time() - path.stat().st_mtime > WEEK:
            shutil.rmtree(path, ignore_errors=True)  # best effort: leftovers do no harm


def cut_to_index(folder: Path, index: Index) -> None:
    """Cut off what a killed build wrote after its index."""
    itemsize = np.dtype(index.dtype).itemsize
    for shard in index.shards:
        path = folder / shard.file
        size = shard.tokens * itemsize
        with contextlib.suppress(OSError):  # `check_content` reports a missing file
            if path.stat().st_size > size:
                os.truncate(path, size)
