"""Turns a corpus into token files on disk, once; one process builds, others wait for it.

It builds in a hidden sibling folder and renames that folder once it is complete and on disk. Ranks
that wait do so without a collective, so no limit of one ends a build that takes hours.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import RunError, UserError
from lockstep.file_systems import Lock, is_full, locked, remedy
from lockstep.settings import as_typed
from lockstep.tokens import build, shards
from lockstep.tokens.recipe import (
    BuildsItself,
    Recipe,
    describe,
    folder_of,
    recipe_of,
)
from lockstep.tokens.sources.source import Source
from lockstep.tokens.tokenizer import NumberTokenizer
from lockstep.whole_files import put_in_place

logger = logging.getLogger(__name__)

DECIDED = "tokens"  # the name by which a run recalls the fingerprint of its tokens
POLL_SECONDS = 0.02


class Place(Protocol):
    """Which of a machine's ranks this process is."""

    @property
    def local_rank(self) -> int:
        """The number of this rank on its machine."""


class Run(Protocol):
    """What decides once, for all of its ranks and later starts."""

    ranks: Any  # a `Place`
    force: bool  # whether it may go on with other tokens

    def check_peers(self) -> None:
        """Raise an error if one of its ranks has failed since this start."""

    def recall(self, name: str) -> Any:
        """Return what was decided under this name; None: nothing yet."""

    def remember(self, name: str, value: Any) -> None:
        """Decide on rank 0; do nothing on others."""


def prepare_once(source: Source, run: Run | None) -> Path:
    """Return the folder with a source's token files, as one rank of a run.

    The first start of a run decides its tokens; later ones don't look at the corpus, unless its
    settings have changed or the folder is missing. One rank of each machine prepares the tokens,
    and the others wait for the folder.

    Args:
        source: what to prepare.
        run: of this rank; None: nobody knows of other processes, so each calls `prepare`.

    Raises:
        UserError: as in `prepare`, or the run has other tokens, or machines see other corpora.
    """
    if run is None:
        return prepare(source)
    place: Place = run.ranks
    if place.local_rank == 0:
        fingerprint = source.fingerprint or _kept(source, run)
        folder = prepare(replace(source, fingerprint=fingerprint))
        fingerprint = shards.load_index(folder).fingerprint
        run.remember(DECIDED, {"marks": source.marks(), "fingerprint": fingerprint})
        if source.fingerprint is None:
            _refuse_other_corpus(folder, fingerprint, _awaited(source, run))
        return folder
    source = replace(source, fingerprint=source.fingerprint or _awaited(source, run))
    while not folder_of(source).is_dir():
        _wait(run)
    return opened(source)


def _kept(source: Source, run: Run) -> str | None:
    """Return the fingerprint that the run has decided; None: the corpus decides it now.

    Raises:
        UserError: changed settings give other tokens than those that the run has.
    """
    decided = decided_of(run)
    if decided is None:
        return None
    fingerprint = str(decided["fingerprint"])
    if source.marks() == decided["marks"] or recipe_of(source).fingerprint == fingerprint:
        return fingerprint
    if run.force:
        return None
    folder = folder_of(replace(source, fingerprint=fingerprint))
    raise UserError(
        f"{_change(decided['marks'], source.marks())} gives other tokens than {folder}, on which "
        "the run trains; leave it out, or set resume_force=true"
    )


def decided_of(run: Run) -> dict[str, Any] | None:
    """Return what a run has decided about its tokens, or raise a `UserError` if it is damaged."""
    decided = run.recall(DECIDED)
    if decided is None:
        return None
    try:
        has_all = "kind" in decided["marks"] and isinstance(decided["fingerprint"], str)
    except (LookupError, TypeError):
        has_all = False
    if not has_all:
        raise UserError(f"{DECIDED} in the run's decided.json is damaged; restore the original")
    return dict(decided)


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first setting that differs, with its value."""
    if before["kind"] != after["kind"]:
        return f"data={after['kind']}"
    return _first_change("data.source", before, after)


def _first_change(place: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first plain setting that differs, also in a source of a mixture."""
    for name, value in after.items():
        if value == before.get(name) or isinstance(value, list):
            continue
        if isinstance(value, dict):
            return _first_change(f"{place}.{name}", before.get(name) or {}, value)
        return f"{place}.{name}={as_typed(value)}"
    return place


def _awaited(source: Source, run: Run) -> str:
    """Return the fingerprint that rank 0 decides for these settings."""
    decided = decided_of(run)
    while decided is None or decided["marks"] != source.marks():
        _wait(run)
        decided = decided_of(run)
    return str(decided["fingerprint"])


def _wait(run: Run) -> None:
    """Wait a moment for the rank that prepares, which may fail, for example over its settings."""
    run.check_peers()
    time.sleep(POLL_SECONDS)


def _refuse_other_corpus(folder: Path, fingerprint: str, decided: str) -> None:
    """Raise a `UserError` if the first machine has decided other tokens."""
    if decided != fingerprint:
        raise UserError(
            f"{folder} has other tokens than the first machine's: its corpus differs; let all "
            "machines see the same files"
        )


def prepare(source: Source, verify: bool = False, tell: bool = False) -> Path:
    """Return the folder with a source's token files; build it first if it doesn't exist.

    Checks the sizes of a finished folder's files and, with `verify`, their content. Doesn't open
    the corpus if the source's fingerprint names an existing folder. With `tell`, also logs that it
    has found a folder. Raises a `UserError` for anything that cannot be read, written, or trusted.
    """
    started = time.perf_counter()
    is_new = False
    is_fixed = source.fingerprint is not None
    if source.fingerprint is None or not folder_of(source).is_dir():
        recipe = _recipe_of(source)
        source = replace(source, fingerprint=recipe.fingerprint)
        try:
            is_new = not recipe.folder.is_dir() and _build(recipe)
        except OSError as error:
            if _is_elsewhere(error, source.root):  # an own source reads files, too
                raise
            raise unwritable(source.root, error) from error
    folder = opened(source)
    if not is_fixed:
        _refuse_other_vocabulary(source, folder)
    if is_new or verify or tell:
        index = shards.load_index(folder)
        if verify:
            shards.check_content(folder, index)
        verb = "prepared" if is_new else "verified" if verify else "found"
        seconds = time.perf_counter() - started
        logger.info("%s %s in %.1f s", verb, describe(folder, index), seconds)
    return folder


def _recipe_of(source: Source) -> Recipe:
    """Return the recipe of `source`; it must give the tokens that `data.fingerprint` names."""
    if source.fingerprint is None:
        return recipe_of(source)
    folder = folder_of(source)
    remedy = "put the folder back, or start a new run with data.fingerprint=null"
    if not folder.is_absolute():
        remedy = f"change to the directory in which the run was trained, {remedy}"
    try:
        recipe = recipe_of(source)
    except UserError as error:
        raise UserError(
            f"{folder} is missing, and cannot be prepared again ({error}); {remedy}"
        ) from error
    if source.fingerprint != recipe.fingerprint:
        raise UserError(
            f"{folder} is missing, and the corpus or its tokenizer has changed since it was "
            f"prepared; {remedy}"
        )
    return recipe


def _refuse_other_vocabulary(source: Source, folder: Path) -> None:
    """Raise a `UserError` if `folder` has the same numbers, but for a vocabulary of another size.

    The size isn't part of what a fingerprint is made of for tokens that are numbers already.
    """
    tokenizer = shards.load_index(folder).tokenizer
    wanted = getattr(source, "vocab_size", None)
    if tokenizer["kind"] != NumberTokenizer.kind or wanted is None:
        return
    if tokenizer["vocab_size"] != wanted:
        size = tokenizer["vocab_size"]
        raise UserError(
            f"data.source.vocab_size={wanted}: {folder} was prepared with {size}; set "
            f"data.source.vocab_size={size}, or delete the folder to prepare it again"
        )


def opened(source: Source) -> Path:
    """Return the folder of `source`; raise a `UserError` if it is damaged or has other tokens."""
    folder = folder_of(source)
    index = shards.load_index(folder)
    shards.check_sizes(folder, index)
    if index.fingerprint != source.fingerprint:
        raise UserError(f"{folder} was prepared from other data; delete it and prepare it again")
    return folder


def _build(recipe: Recipe) -> bool:
    """Build the folder and return True, or wait until another process has, and return False."""
    folder = recipe.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    busy = "waiting for another process that prepares the same data"
    with only_builder(lock, folder.parent, busy) as is_locked:
        if folder.is_dir():
            return False
        # Without locks, ranks of several machines may build at once, each into its own folder.
        machine = "" if is_locked else f".on-{socket.gethostname()}"
        unfinished = folder.with_name(f".{folder.name}{machine}.unfinished")
        if isinstance(recipe.source, BuildsItself):
            recipe.source.build(recipe, unfinished)
        else:
            build.write(recipe, unfinished)
        if recipe_of(recipe.source).fingerprint != recipe.fingerprint:
            shutil.rmtree(unfinished)
            raise UserError(f"{folder.name}: the corpus changed meanwhile; prepare it again")
        return put_in_place(unfinished, folder)


def _is_elsewhere(error: OSError, root: str) -> bool:
    """Return whether a failure is about a file that has nothing to do with prepared tokens."""
    if not isinstance(error.filename, str):
        return False
    place = Path(error.filename).absolute()
    folder = Path(root).expanduser().absolute()
    return not (place.is_relative_to(folder) or folder.is_relative_to(place))


def unwritable(root: str, error: OSError) -> UserError | RunError:
    """Return the error for a folder of prepared tokens that cannot be written."""
    kind = RunError if is_full(error) else UserError
    fault = f"data.root={root} cannot be written ({error.strerror})"
    return kind(f"{fault}; {remedy(error, 'data.root')}")


@contextmanager
def only_builder(path: Path, root: Path, busy: str = "") -> Iterator[bool]:
    """Lock `path` exclusively; the system unlocks it however the process ends.

    Args:
        path: the lock's file.
        root: the folder of prepared tokens.
        busy: what to say while another process has the lock.

    Yields:
        Whether it is locked: some disks have no locks, which is said once.

    Raises:
        OSError: the file cannot be written, or the disk is broken.
    """
    with path.open("a") as file:
        state = locked(partial(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB))
        if state is Lock.BUSY:
            if busy:
                logger.info(busy)
            fcntl.flock(file, fcntl.LOCK_EX)
        if state is Lock.UNSUPPORTED:
            _tell_of_no_locks(root)
        yield state is not Lock.UNSUPPORTED


@cache  # once, however many folders are built there
def _tell_of_no_locks(root: Path) -> None:
    logger.warning("data.root=%s is on a disk without locks: prepare it only once", root)
