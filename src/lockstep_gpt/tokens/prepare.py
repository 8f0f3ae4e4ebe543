"""Turns a corpus into token files on disk, once; one process builds, others wait for it.

It builds in a hidden sibling folder and renames that folder once it is complete and on disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lockstep_gpt.tokens import build, shards
from lockstep_gpt.tokens.data_settings import DataConfig
from lockstep_gpt.tokens.recipe import (
    BuildsItself,
    Recipe,
    describe,
    folder_of,
    recipe_of,
)
from lockstep_gpt.tokens.tokenizer import NumberTokenizer
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.whole_files import sync_folder

logger = logging.getLogger(__name__)


def prepare(config: DataConfig, verify: bool = False, tell: bool = False) -> Path:
    """Return the folder with the token files of `config`; build it first if it doesn't exist.

    Checks the sizes of a finished folder's files and, with `verify`, their content. Doesn't open
    the corpus if `data.fingerprint` names an existing folder. With `tell`, also logs that it has
    found a folder. Raises a `UserError` for anything that cannot be read, written, or trusted.
    """
    started = time.perf_counter()
    is_new = False
    is_fixed = config.fingerprint is not None
    if config.fingerprint is None or not folder_of(config).is_dir():
        recipe = _recipe_of(config)
        config = replace(config, fingerprint=recipe.fingerprint)
        try:
            is_new = not recipe.folder.is_dir() and _build(recipe)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            kind = RunError if is_full else UserError
            raise kind(
                f"data.root={config.root} cannot be written ({error.strerror}); set data.root to a "
                "folder that you may write, on a disk with space"
            ) from error
    folder = opened(config)
    if not is_fixed:
        _refuse_other_vocabulary(config, folder)
    if is_new or verify or tell:
        index = shards.load_index(folder)
        if verify:
            shards.check_content(folder, index)
        verb = "prepared" if is_new else "verified" if verify else "found"
        seconds = time.perf_counter() - started
        logger.info("%s %s in %.1f s", verb, describe(folder, index), seconds)
    return folder


def refuse_other_tokens(config: DataConfig, place: str, run: Path) -> None:
    """Raise a `UserError` if `place`, a setting that a resume changes, has other text than the run.

    `prepare` doesn't look there if the run's tokens exist.
    """
    if recipe_of(config).fingerprint != config.fingerprint:
        raise UserError(
            f"{place} has other text than {folder_of(config)}, on which the run trains; leave it "
            f"out, or start a new run with its weights: resume={run} resume_force=true"
        )


def _recipe_of(config: DataConfig) -> Recipe:
    """Return the recipe of `config`; it must give the tokens that `data.fingerprint` names."""
    if config.fingerprint is None:
        return recipe_of(config)
    folder = folder_of(config)
    remedy = "put the folder back, or start a new run with data.fingerprint=null"
    if not folder.is_absolute():
        remedy = f"change to the directory in which the run was trained, {remedy}"
    try:
        recipe = recipe_of(config)
    except UserError as error:
        raise UserError(
            f"{folder} is missing, and cannot be prepared again ({error}); {remedy}"
        ) from error
    if config.fingerprint != recipe.fingerprint:
        raise UserError(f"{folder} is missing, and the corpus now gives other tokens; {remedy}")
    return recipe


def _refuse_other_vocabulary(config: DataConfig, folder: Path) -> None:
    """Raise a `UserError` if `folder` has the same numbers, but for a vocabulary of another size.

    The size isn't part of what a fingerprint is made of for tokens that are numbers already.
    """
    tokenizer = shards.load_index(folder).tokenizer
    wanted = getattr(config, "vocab_size", None)
    if tokenizer["kind"] != NumberTokenizer.kind or wanted is None:
        return
    if tokenizer["vocab_size"] != wanted:
        size = tokenizer["vocab_size"]
        raise UserError(
            f"data.source.vocab_size={wanted}: {folder} was prepared with {size}; set "
            f"data.source.vocab_size={size}, or delete the folder to prepare it again"
        )


def opened(config: DataConfig) -> Path:
    """Return the folder of `config`; raise a `UserError` if it is damaged or has other tokens."""
    folder = folder_of(config)
    index = shards.load_index(folder)
    shards.check_sizes(folder, index)
    if index.fingerprint != config.fingerprint:
        raise UserError(f"{folder} was prepared from other data; delete it and prepare it again")
    return folder


def _build(recipe: Recipe) -> bool:
    """Build the folder and return True, or wait until another process has, and return False."""
    folder = recipe.folder
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return False
        if isinstance(recipe.source, BuildsItself):
            recipe.source.build(recipe, unfinished)
        else:
            build.write(recipe, unfinished)
        if recipe_of(recipe.source).fingerprint != recipe.fingerprint:
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
