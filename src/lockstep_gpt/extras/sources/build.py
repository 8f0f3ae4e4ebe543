"""Builds a prepared folder in several processes, and resumes a build that was killed.

Each time a token file is full, the index in the folder records the progress.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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

from lockstep_gpt.config import DataConfig, UserError
from lockstep_gpt.data import prepare, shards
from lockstep_gpt.data.prepare import (
    SPLITS,
    Recipe,
    begin,
    finish,
    progress,
)
from lockstep_gpt.data.shards import (
    INDEX,
    Index,
    Split,
    SplitWriter,
)
from lockstep_gpt.data.tokenizer import Tokens, from_dict
from lockstep_gpt.extras.sources.blocks import (
    Block,
    Blocks,
    InShards,
    Position,
    TokenBlock,
    stretches_of,
)
from lockstep_gpt.extras.sources.growing import (
    Documents,
    Encoder,
    HashWriter,
    earlier_state,
    remember,
)
from lockstep_gpt.processes import end_with_parent

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

WEEK = 604_800.0  # seconds
BLOCKS = ".blocks-"  # a folder for blocks from other processes
KNOWN = f"{BLOCKS}known"  # for documents of an earlier state


def write(recipe: Recipe, folder: Path) -> None:
    """Write the rest of the folder; if that fails after a full token file, the next call resumes.

    Raises:
        UserError: the disk is full, a process was killed, or a split is empty.
    """
    if not isinstance(recipe.corpus, Blocks):
        limit = _largest(recipe.config)
        prepare.write(recipe, folder, partial(ResumedWriter, limit=limit, split=Split()))
        return
    _remove_abandoned(folder.parent)
    try:
        _write(recipe, recipe.corpus, folder)
    except BaseException as error:
        if len([*folder.glob("*.bin")]) <= len(SPLITS):  # no token file is full yet
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"data.root={recipe.config.root} has no space left for the prepared tokens; free "
                "some (finished work is kept), or set data.root to a folder on a larger disk"
            ) from error
        raise


def _largest(config: DataConfig) -> int:
    """Return the maximum size of a token file in bytes; a source doesn't need to set it."""
    return int(getattr(config, "shard_mb", InShards.shard_mb)) << 20


def _write(recipe: Recipe, corpus: Blocks, folder: Path) -> None:
    """Write the rest of the token files, then the final index."""
    index, limit = _begun(recipe, folder), _largest(recipe.config)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                closing(ResumedWriter(folder, name, index.dtype, limit, split))
            )
            for name, split in index.splits.items()
        }
        bar = stack.enter_context(progress(recipe, index.position[2]))
        hashes = stack.enter_context(closing(HashWriter(folder, index)))
        full = [len(writer.full) for writer in writers.values()]
        earlier, known = _remembered(recipe, folder, index), 0
        for after, invalid, splits in _encoded(recipe, corpus, folder, index.position):
            for split, documents, count, size in splits:
                writers[split].append(documents.ids, count, size)
                hashes.append(split, documents.hashes)
                known += documents.known
            invalid += index.invalid_documents
            index = replace(index, position=[*after], invalid_documents=invalid)
            if full != (full := [len(writer.full) for writer in writers.values()]):
                hashes.sync()
                _save(folder, index, writers)
            _show(bar, after.read, writers)
        if not any(writer.tokens for writer in writers.values()):
            source = recipe.config.source
            raise UserError(f"data.source={source} contains no text; choose a corpus that does")
        hashes.sync()
        shutil.rmtree(folder / KNOWN, ignore_errors=True)
        if known:
            done = sum(writer.documents for writer in writers.values())
            logger.info("%s of %s documents are those of %s", f"{known:,}", f"{done:,}", earlier)
        finish(recipe, folder, index, writers)


def _remembered(recipe: Recipe, folder: Path, index: Index) -> Path | None:
    """Look for an earlier state of the corpus, and write down where its documents are."""
    end = recipe.tokenizer.end_of_text
    earlier = earlier_state(folder.parent, recipe.config.source, index)
    if earlier is None or end is None or not remember(earlier, end, folder / KNOWN):
        return None
    return earlier


def _save(folder: Path, index: Index, writers: dict[str, ResumedWriter]) -> None:
    splits = {name: writer.saved() for name, writer in writers.items()}
    shards.write_index(folder, replace(index, splits=splits))


def _begun(recipe: Recipe, folder: Path) -> Index:
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
    index = replace(begin(recipe, folder), position=[*Position()])
    shards.write_index(folder, index)
    return index


class Encoded(NamedTuple):
    """The tokens of a block of a corpus."""

    after: Position
    invalid: int
    splits: list[tuple[str, Documents, int, int]]  # name, tokens, documents, bytes of text


def _encoded(
    recipe: Recipe, corpus: Blocks, folder: Path, position: list[int]
) -> Iterator[Encoded]:
    """Tokenize in other processes, or in a thread while the next block is read; keep the order."""
    processes = getattr(recipe.config, "num_proc", 1)
    if processes == 1:
        with ThreadPoolExecutor(1, initializer=_begin, initargs=(folder,)) as thread:
            yield from _in_turn(thread, _encode, corpus, position, 1)
        return
    spawn = multiprocessing.get_context("spawn")
    # The tokenizer and the blocks are sent as files. A process that is killed while it sends more
    # than fits into a pipe would block the pool forever.
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=BLOCKS) as blocks,
        ProcessPoolExecutor(processes, spawn, _begin_process, (folder,)) as executor,
    ):
        encode = partial(_encode_to_file, blocks)
        try:
            for path in _in_turn(executor, encode, corpus, position, processes):
                yield pickle.loads(path.read_bytes())
                path.unlink()
        except BrokenProcessPool as error:
            raise UserError(
                f"data.num_proc={processes}: a process was killed, perhaps for lack of memory; "
                "lower it"
            ) from error


def _in_turn(
    executor: Executor,
    encode: Callable[[Any], Result],
    corpus: Blocks,
    position: list[int],
    processes: int,
) -> Iterator[Result]:
    """Yield the result for each block, in order; a few blocks are read ahead."""
    waiting: deque[Future[Result]] = deque()
    for block in corpus.blocks(Position(*position)):
        waiting.append(executor.submit(encode, block))
        if len(waiting) > processes:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_encoder: Encoder


def _begin_process(folder: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    end_with_parent()  # if the parent is killed, this would wait for it forever
    _begin(folder)


def _begin(folder: Path) -> None:
    global _encoder  # per process: made once, not sent with every block
    _encoder = Encoder(from_dict(shards.load_index(folder).tokenizer), folder / KNOWN)


def _encode(block: Block | TokenBlock) -> Encoded:
    if isinstance(block, TokenBlock):
        return Encoded(block.after, 0, [(block.split, Documents(block.ids, b"", 0), 0, 0)])
    splits = [
        (split, _encoder.encode(texts), len(texts), sum(map(len, texts)))
        for split, texts, _ in stretches_of(block)
    ]
    return Encoded(block.after, block.invalid, splits)


def _encode_to_file(folder: str, block: Block | TokenBlock) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        pickle.dump(_encode(block), file)
    return Path(file.name)


def _show(bar: tqdm[Any], read: int, writers: dict[str, ResumedWriter]) -> None:
    documents = sum(writer.documents for writer in writers.values())
    tokens = sum(writer.tokens for writer in writers.values())
    bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
    bar.update(read - bar.n)


def _remove_abandoned(root: Path) -> None:
    """Remove killed builds that weren't resumed for a week."""
    for path in root.glob(".*-????????.unfinished"):
        if time.time() - path.stat().st_mtime > WEEK:
            shutil.rmtree(path, ignore_errors=True)  # best effort: leftovers do no harm


class ResumedWriter(SplitWriter):
    """Continues where an index ends, cuts off anything after it, and starts a new file at a limit.

    Args:
        folder: where the files are.
        name: name of the split.
        dtype: type of the ids on disk.
        limit: bytes of a file, a multiple of the memory page.
        split: the split as the index has it.
    """

    def __init__(self, folder: Path, name: str, dtype: str, limit: int, split: Split) -> None:
        self.folder, self.name, self.dtype, self.limit = folder, name, np.dtype(dtype), limit
        self.tokens, self.documents = split.tokens, split.documents
        self.text_bytes = split.text_bytes
        files, self._size = divmod(split.tokens * self.dtype.itemsize, limit)
        self.full = split.shards[:files]
        self._open(files, "a+b")
        self._file.truncate(self._size)
        self._file.seek(0)
        self._hash = hashlib.file_digest(self._file, "sha256")

    def append(self, ids: Tokens, documents: int = 0, text_bytes: int = 0) -> None:
        """Append ids, (tokens,), of `documents` documents with `text_bytes` bytes of text."""
        while ids.size:
            if self._size == self.limit:
                self.full = self.saved().shards
                self.close()
                self._size = 0
                self._open(len(self.full), "wb")
            part, ids = np.split(ids, [(self.limit - self._size) // self.dtype.itemsize])
            super().append(part)
            self._size += part.size * self.dtype.itemsize
        self.documents += documents
        self.text_bytes += text_bytes

    def _open(self, number: int, mode: str) -> None:
        self._file = (self.folder / f"{self.name}-{number:05}.bin").open(mode)
        self._hash = hashlib.sha256()

    def saved(self) -> Split:
        """Sync everything to disk and return its entry for the index."""
        split, tokens = super().saved(), self._size // self.dtype.itemsize
        last = [replace(shard, tokens=tokens) for shard in split.shards if tokens]
        return replace(split, shards=[*self.full, *last])


def cut_to_index(folder: Path, index: Index) -> None:
    """Cut off what a killed build wrote after its index."""
    for shard in index.shards:
        size = shard.tokens * np.dtype(index.dtype).itemsize
        with contextlib.suppress(OSError):  # `check_sizes` reports a missing file
            if (folder / shard.file).stat().st_size > size:
                os.truncate(folder / shard.file, size)
