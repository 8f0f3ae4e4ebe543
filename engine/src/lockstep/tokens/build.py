"""Builds a prepared folder block by block, and resumes a build that was killed.

Each time a token file is full, the index in the folder records the progress. The corpus is
tokenized in other processes, or in a thread while the next block is read, in order.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from lockstep.errors import RunError, UserError
from lockstep.file_systems import is_full, remedy
from lockstep.processes import end_with_parent
from lockstep.tokens import shards
from lockstep.tokens.recipe import Recipe, create_folder, progress, refuse_empty_splits, splits_of
from lockstep.tokens.shards import INDEX, Index, SplitWriter
from lockstep.tokens.sources.source import (
    Block,
    Documents,
    Position,
    Source,
    TokenBlock,
    group_by_split,
)
from lockstep.tokens.tokenizer import Tokenizer, Tokens
from lockstep.tokens.tokenizer_choice import from_dict

logger = logging.getLogger(__name__)

WEEK = 604_800.0  # seconds
Result = TypeVar("Result")
BLOCKS = ".blocks-"  # a folder for blocks from other processes


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
        if isinstance(error, OSError) and is_full(error):
            raise RunError(
                f"data.root={recipe.source.root} has no space left for the prepared tokens "
                f"({error.strerror}); {remedy(error)} (finished work is kept), or set data.root to "
                "a folder on a larger disk"
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
            what = "text" if isinstance(recipe.source, Documents) else "tokens"
            path = getattr(recipe.source, "path", None)
            place = f" in data.source.path={path}" if path else ""
            raise UserError(
                f"data={recipe.source.kind} contains no {what}{place}; choose a corpus that does"
            )
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
    for pattern in (".*-????????.unfinished", ".*-????????.on-*.unfinished"):
        for path in root.glob(pattern):
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


class Encoded(NamedTuple):
    """The tokens of a block of a corpus."""

    after: Position
    invalid: int
    splits: list[tuple[str, Tokens, int, int]]  # name, ids, documents, bytes of text


def encode_corpus(source: Source, folder: Path, position: list[int]) -> Iterator[Encoded]:
    """Tokenize a corpus from a position on, block by block; `folder` has the index of the build.

    Raises:
        UserError: a block can't be read, or a process was killed.
    """
    processes = getattr(source, "num_proc", 1)
    if processes == 1:
        with ThreadPoolExecutor(1, initializer=_load_tokenizer, initargs=(folder,)) as thread:
            yield from _results_in_order(thread, _encode, source, position, 1)
        return
    # The tokenizer and the blocks are sent as files. A process that is killed while it sends more
    # than fits into a pipe would block the pool forever.
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=BLOCKS) as blocks,
        _make_pool(processes, folder) as executor,
    ):
        encode = partial(_encode_to_file, blocks)
        try:
            for path in _results_in_order(executor, encode, source, position, processes):
                yield pickle.loads(path.read_bytes())
                path.unlink()
        except BrokenProcessPool as error:
            raise UserError(
                f"data.source.num_proc={processes}: a process was killed, perhaps for lack of "
                "memory; lower it"
            ) from error


def _make_pool(processes: int, folder: Path) -> ProcessPoolExecutor:
    """Return a pool of processes, which are started when they are needed.

    Raises:
        UserError: the system refuses the semaphores of its queues.
    """
    spawn = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(processes, spawn, _start_process, (folder, os.getpid()))
    except (OSError, NotImplementedError) as error:  # the latter: from a system without any
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"data.source.num_proc={processes} needs semaphores, which the system refuses "
            f"({reason}; on "
            "Linux they are in /dev/shm); make /dev/shm writable, or set data.source.num_proc=1"
        ) from error


def _results_in_order(
    executor: Executor,
    encode: Callable[[Any], Result],
    source: Source,
    position: list[int],
    processes: int,
) -> Iterator[Result]:
    """Yield the result for each block, in order; a few blocks are read ahead."""
    waiting: deque[Future[Result]] = deque()
    for block in source.blocks(Position(*position)):
        waiting.append(executor.submit(encode, block))
        if len(waiting) > processes:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_tokenizer: Tokenizer


def _start_process(folder: Path, parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    end_with_parent(parent)  # if the parent is killed, this would wait for it forever
    _load_tokenizer(folder)


def _load_tokenizer(folder: Path) -> None:
    global _tokenizer  # per process: made once, not sent with every block
    _tokenizer = from_dict(shards.load_index(folder).tokenizer)


def _encode(block: Block | TokenBlock) -> Encoded:
    if isinstance(block, TokenBlock):
        part = (block.split, block.ids, block.documents, block.text_bytes)
        return Encoded(block.after, 0, [part])
    splits = [
        (split, _tokenizer.encode_documents(texts), len(texts), sum(map(len, texts)))
        for split, texts in group_by_split(block)
    ]
    return Encoded(block.after, block.invalid, splits)


def _encode_to_file(folder: str, block: Block | TokenBlock) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        pickle.dump(_encode(block), file)
    return Path(file.name)
