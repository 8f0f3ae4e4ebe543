"""Tokenizes a corpus in other processes, or in a thread while the next block is read, in order."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import UserError
from lockstep.processes import end_with_parent
from lockstep.tokens import shards
from lockstep.tokens.sources.source import (
    Block,
    Position,
    Source,
    TokenBlock,
    group_by_split,
)
from lockstep.tokens.tokenizer import Tokenizer, Tokens
from lockstep.tokens.tokenizer_choice import from_dict

Result = TypeVar("Result")

BLOCKS = ".blocks-"  # a folder for blocks from other processes


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
