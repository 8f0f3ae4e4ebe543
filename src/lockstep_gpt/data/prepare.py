"""From a corpus to token files on disk, once: `prepare` turns the `data` settings into a folder.

A build happens in a hidden sibling folder that is renamed when it is whole and on the disk. Each
time a token file is full, the index in it says how far the build is, so that a killed one goes on
from there, and nothing unfinished passes for finished. One process builds, others wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lockstep_gpt.config import DataConfig, UserError
from lockstep_gpt.data import corpora, shards
from lockstep_gpt.data.shards import INDEX, Index, SplitWriter
from lockstep_gpt.data.tokenizer import (
    Tokenizer,
    Tokens,
    from_dict,
    make_tokenizer,
    token_dtype,
    tokenizer_files,
)
from lockstep_gpt.processes import end_with_parent

logger = logging.getLogger(__name__)

SPLITS = ("train", "val")
# Settings that decide no token; where the corpus lies is in its identity, as far as it matters.
HARMLESS = {"root", "path", "val_tokens", "num_workers", "num_proc"}
TOKENIZER = ("tokenizer", "vocab_size", "tokenizer_mb")
WEEK = 604_800.0  # seconds


@dataclass(frozen=True)
class Recipe:
    """What decides the tokens of one prepared folder."""

    config: DataConfig
    corpus: corpora.Corpus
    settings: dict[str, Any]  # that decide tokens or files
    fingerprints: dict[str, str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, learnt from the corpus if it is `bpe`; of what is no text: numbers."""
        config: Any = self.config
        texts = _training_texts(self.corpus, getattr(config, "tokenizer_mb", 0) << 20)
        return make_tokenizer(getattr(config, "tokenizer", "numbers"), config.vocab_size, texts)

    @property
    def fingerprint(self) -> str:
        """64 hex digits that change with anything that decides the tokens."""
        return _digest([shards.FORMAT, self.fingerprints])


def prepare(config: DataConfig, verify: bool = False) -> Path:
    """Return the folder with the token files of `config`, built first where it is not there yet.

    The folder is `<data.root>/<source>-<8 hex digits>`; the digits change with the corpus, the
    tokenizer and the settings that decide the tokens. A finished folder is checked for size, to
    `verify` for content.

    Raises:
        UserError: the corpus is empty or cannot be read, the root is full or cannot be written, or
            a finished folder is not what its index says.
    """
    started = time.perf_counter()
    recipe, root = recipe_of(config), Path(config.root).expanduser()
    folder = root / f"{config.source}-{recipe.fingerprint[:8]}"
    try:
        built = not folder.is_dir() and _build(recipe, folder)
    except OSError as error:
        raise _refusal(root, error) from error
    index = shards.load_index(folder)
    shards.check_sizes(folder, index)
    if index.fingerprint != recipe.fingerprint:
        raise UserError(f"{folder} was prepared from other data; delete it and prepare it again")
    if verify:
        shards.check_content(folder, index)
    if built or verify:
        done = "prepared" if built else "verified"
        seconds = time.perf_counter() - started
        logger.info("%s %s in %.1f s", done, contents(folder, index), seconds)
    return folder


def recipe_of(config: DataConfig) -> Recipe:
    """Open the corpus of `config` and find out what decides its tokens.

    Raises:
        UserError: it is not there.
    """
    if getattr(config, "path", None) == "":
        raise UserError(
            f"data.path is empty; set it to what data.source={config.source} shall read"
        )
    corpus = corpora.corpus_of(config)
    settings = {name: value for name, value in asdict(config).items() if name not in HARMLESS}
    name, *sizes = [settings.pop(name, None) for name in TOKENIZER]
    files = [hashlib.sha256(path.read_bytes()).hexdigest() for path in tokenizer_files(name or "")]
    tokenizer = [files or name, *(sizes if name in ("bpe", None) else ())]
    parts = {"source": corpus.identity(), "tokenizer": tokenizer, "settings": settings}
    return Recipe(config, corpus, settings, {part: _digest(each) for part, each in parts.items()})


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _build(recipe: Recipe, folder: Path) -> bool:
    """Make `folder` and return True, or wait until another process has made it."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return False
        _remove_abandoned(folder.parent)
        try:
            _write(recipe, unfinished)
            if recipe_of(recipe.config).fingerprint != recipe.fingerprint:
                shutil.rmtree(unfinished)
                raise UserError(f"{folder.name}: the corpus changed meanwhile; prepare it again")
            _sync(unfinished)
            unfinished.rename(folder)
        finally:
            if len([*unfinished.glob("*.bin")]) <= len(SPLITS):  # no token file is full yet
                shutil.rmtree(unfinished, ignore_errors=True)
    _sync(folder.parent)
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` alone; the system lets go of it when the process ends, however that is."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(recipe: Recipe, folder: Path) -> None:
    """Write what is missing of the token files, and last the index of all."""
    index, limit = _begun(recipe, folder), recipe.config.shard_mb << 20
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(closing(SplitWriter(folder, name, index.dtype, limit, split)))
            for name, split in index.splits.items()
        }
        bar = stack.enter_context(
            corpora.progress("preparing", recipe.corpus.size, index.position[2])
        )
        full = [len(writer.full) for writer in writers.values()]
        for after, invalid, splits in _encoded(recipe, folder, index.position):
            for split, ids, documents, size in splits:
                writers[split].append(ids, documents, size)
            invalid += index.invalid_documents
            index = replace(index, position=[*after], invalid_documents=invalid)
            if full != (full := [len(writer.full) for writer in writers.values()]):
                _save(folder, index, writers)
            _show(bar, after.read, writers)
        _refuse_empty(recipe.config, writers)
        _save(folder, index, writers)


def _save(folder: Path, index: Index, writers: dict[str, SplitWriter]) -> None:
    splits = {name: writer.saved() for name, writer in writers.items()}
    shards.write_index(folder, replace(index, splits=splits))


def _begun(recipe: Recipe, folder: Path) -> Index:
    """Return how far a killed build came, or the index of one that begins."""
    if (folder / INDEX).exists():
        try:
            index = shards.load_index(folder)
            if index.fingerprint == recipe.fingerprint:
                shards.cut_to_index(folder, index)
                shards.check_content(folder, index)
                done = sum(split.tokens for split in index.splits.values())
                logger.info("going on after %s tokens", f"{done:,}")
                return index
        except UserError as error:
            logger.warning("%s; so it begins again", str(error).split(";")[0])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    index = Index(
        format=shards.FORMAT,
        dtype=token_dtype(recipe.tokenizer.vocab_size).newbyteorder("<").str,
        tokenizer=recipe.tokenizer.to_dict(),
        fingerprint=recipe.fingerprint,
        fingerprints=recipe.fingerprints,
        settings=recipe.settings,
        position=[*corpora.Position()],
        invalid_documents=0,
        splits=dict.fromkeys(SPLITS, shards.Split()),
    )
    shards.write_index(folder, index)
    return index


def _training_texts(corpus: corpora.Corpus, size: int) -> Iterator[str]:
    """Yield the first bytes of the training documents, for `bpe` to learn from."""
    for block in corpus.blocks(corpora.Position()):
        assert isinstance(block, corpora.Block)
        for text in compress(block.texts, map(not_, block.val)):
            if size <= 0:
                return
            yield text[:size].decode("utf-8", "ignore")
            size -= len(text)


class Encoded(NamedTuple):
    """What a block of a corpus became."""

    after: corpora.Position
    invalid: int
    splits: list[tuple[str, Tokens, int, int]]  # the ids, documents and bytes of text of each


def _encoded(recipe: Recipe, folder: Path, position: list[int]) -> Iterator[Encoded]:
    """Tokenize in other processes, or in a thread while the next block is read; order is kept."""
    processes = getattr(recipe.config, "num_proc", 1)
    # The tokenizer goes by a file: a child that dies while it is sent too much is waited for.
    executor: Executor = ThreadPoolExecutor(1, initializer=_begin, initargs=(folder,))
    if processes > 1:
        spawn = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(processes, spawn, _begin_process, (folder,))
    waiting: deque[Future[Encoded]] = deque()
    with executor:
        try:
            for block in recipe.corpus.blocks(corpora.Position(*position)):
                waiting.append(executor.submit(_encode, block))
                if len(waiting) > processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                f"data.num_proc={processes}: a process was killed, for want of memory perhaps; "
                "set it lower"
            ) from error


_tokenizer: Tokenizer


def _begin_process(folder: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores have a process each
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers
    end_with_parent()  # killed perhaps: its pool would wait for it for good
    _begin(folder)


def _begin(folder: Path) -> None:
    global _tokenizer  # of this process: made once, not sent with every block
    _tokenizer = from_dict(shards.load_index(folder).tokenizer)


def _encode(block: corpora.Block | corpora.TokenBlock) -> Encoded:
    if isinstance(block, corpora.TokenBlock):
        return Encoded(block.after, 0, [(block.split, block.ids, 0, 0)])
    splits = []
    for split, chosen in (("train", map(not_, block.val)), ("val", block.val)):
        if texts := list(compress(block.texts, chosen)):
            ids = _tokenizer.encode_documents(texts)
            splits.append((split, ids, len(texts), sum(map(len, texts))))
    return Encoded(block.after, block.invalid, splits)


def _show(bar: tqdm[Any], read: int, writers: dict[str, SplitWriter]) -> None:
    documents = sum(writer.documents for writer in writers.values())
    tokens = sum(writer.tokens for writer in writers.values())
    bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
    bar.update(read - bar.n)


def _refuse_empty(config: DataConfig, writers: dict[str, SplitWriter]) -> None:
    if not any(writer.tokens for writer in writers.values()):
        raise UserError(f"data.source={config.source} holds no text; choose a corpus that does")
    for name, remedy in (("val", "raise it or take a larger corpus"), ("train", "lower it")):
        if not writers[name].tokens:
            raise UserError(
                f"data.val_fraction={config.val_fraction} leaves no tokens for the {name} split "
                f"of {config.source}; {remedy}"
            )


def _sync(folder: Path) -> None:
    """See the folder's own entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(root: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"data.root={root} has no space left for the prepared tokens; free some, and what is "
            "done stays, or set data.root to a folder on a larger disk"
        )
    return UserError(
        f"data.root={root} cannot be written ({error.strerror}); set data.root to a folder that "
        "you may write"
    )


def _remove_abandoned(root: Path) -> None:
    """Remove what killed builds left if nobody went on with it for a week."""
    for path in root.glob(".*-????????.unfinished"):
        if time.time() - path.stat().st_mtime > WEEK:
            shutil.rmtree(path, ignore_errors=True)  # a courtesy: a leftover harms nobody


def contents(folder: Path, index: Index) -> str:
    """Say in a line what a prepared folder holds."""
    documents = sum(split.documents for split in index.splits.values())
    size = sum(split.text_bytes for split in index.splits.values()) / 1e6
    done = index.settings.get("invalid_utf8")
    invalid = f" ({index.invalid_documents} not UTF-8: {done})" * bool(index.invalid_documents)
    text = f": {documents:,} documents{invalid}, {size:.1f} MB" if documents else ""
    counts = " and ".join(f"{split.tokens:,} {name}" for name, split in index.splits.items())
    return f"{index.settings['source']}{text} -> {folder} ({counts} tokens)"
