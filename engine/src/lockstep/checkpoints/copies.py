"""Copies of checkpoints in a folder or at an fsspec URL."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from lockstep.checkpoints import reading as checkpoint
from lockstep.checkpoints.content import CheckpointError
from lockstep.checkpoints.sums import (
    VerifiedCheckpoint,
    files_of,
    sum_path,
    verify,
)
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory

logger = logging.getLogger(__name__)

# A run draws an id for its copies. Two files have it:
STAMP_SUFFIX = ".run"  # next to the folder of copies: its name with this suffix
ID_FILE = ".copies"  # in the run directory


def copies_of(run_dir: str | Path, copy_to: str) -> str:
    """Return where copies of this run's checkpoints go, in the folder or URL `copy_to`.

    The location contains the whole `run_dir`, as it was frozen: each sweep has a job 0. A run that
    lost its directory finds its copies only by this.
    """
    parts = Path(run_dir).parts
    return "/".join([copy_to.rstrip("/"), *(part for part in parts if part not in ("/", ".."))])


def claim(directory: RunDirectory, url: str, *, continues: bool = False) -> None:
    """Mark the folder of copies as this run's.

    Args:
        directory: the run.
        url: the folder.
        continues: whether the run may have copies that its directory has forgotten.

    Raises:
        UserError: it contains another run's copies.
        Exception: any error of a remote file system.
    """
    files, folder = fsspec.core.url_to_fs(url)
    stamp = f"{folder}{STAMP_SUFFIX}"
    id_file = directory.path / ID_FILE
    copies = files.exists(folder) and files.glob(f"{folder}/step=*.ckpt")
    theirs = ""
    if copies and files.exists(stamp):
        theirs = files.cat_file(stamp).decode()
    ours = ""
    if id_file.exists():
        ours = id_file.read_text(encoding="ascii")
    if ours:
        is_ours = theirs in ("", ours)
    else:  # only a run that continues has copies without knowing their id
        is_ours = continues or directory.metrics.exists()
    if copies and not is_ours:
        raise UserError(
            f"checkpoint.copy_to: {url} contains copies of another run; continue it with "
            "resume=auto, or set another run_dir or copy_to"
        )
    ours = ours or theirs or secrets.token_hex(8)
    id_file.write_text(ours, encoding="ascii")
    files.makedirs(folder, exist_ok=True)
    files.pipe_file(stamp, ours.encode())


def copy_out(path: Path, url: str) -> None:
    """Copy a checkpoint, its checksum first and itself last, to the folder or fsspec URL `url`."""
    files, folder = fsspec.core.url_to_fs(url)
    files.makedirs(folder, exist_ok=True)
    for source in files_of(path):
        temporary = f"{folder}/.{source.name}.tmp"
        files.put_file(str(source), temporary)
        files.mv(temporary, f"{folder}/{source.name}")


def remove_copy(name: str, url: str) -> None:
    """Delete the copy of the checkpoint `name` in `url`, its checksum last."""
    files, folder = fsspec.core.url_to_fs(url)
    parts = [Path(str(part)).name for part in files.glob(f"{folder}/{Path(name).stem}.*.part")]
    for file_name in (name, *parts, f"{name}.sha256"):
        if files.exists(f"{folder}/{file_name}"):
            files.rm_file(f"{folder}/{file_name}")


def fetch(
    directory: RunDirectory,
    run_dir: str | Path,
    copy_to: str,
    compare: Callable[[str, dict[str, Any]], None] | None,
) -> VerifiedCheckpoint | None:
    """Fetch the newest intact copy for a run that lost its own checkpoints.

    Args:
        directory: the run.
        run_dir: its name, as it was frozen.
        copy_to: the folder or URL with copies of runs.
        compare: refuses other settings; None: the copy may have some.

    Raises:
        UserError: it belongs to another run.
    """
    url = copies_of(run_dir, copy_to)
    copy = fetch_newest(url, directory.checkpoints)
    if copy is None:
        return None
    try:
        name = f"{url}/{copy.path.name}"
        saved = checkpoint.read_verified(copy)["config"]
        _refuse_another_run(name, saved["run_dir"], run_dir)
        if compare is not None:
            compare(name, saved)
    except UserError:
        checkpoint.remove_checkpoint(copy.path)
        raise
    return copy


def _refuse_another_run(name: str, saved: Any, run_dir: str | Path) -> None:
    if str(saved) != str(run_dir):
        raise UserError(
            f"{name} is a copy of run_dir={saved}, not of {run_dir}; set "
            "another checkpoint.copy_to, or download it, and start a new run with resume=ITS_PATH"
        )


def fetch_newest(url: str, folder: Path) -> VerifiedCheckpoint | None:
    """Fetch the newest copy in `url` that verifies to `folder`; return None if there is none."""
    files, remote = fsspec.core.url_to_fs(url)
    folder.mkdir(parents=True, exist_ok=True)
    copies = [folder / Path(str(name)).name for name in files.glob(f"{remote}/step=*.ckpt")]
    for path in sorted(copies, key=checkpoint.step_of, reverse=True):
        sums = sum_path(path)  # first: it names the other files
        if files.exists(f"{remote}/{sums.name}"):
            files.get_file(f"{remote}/{sums.name}", str(sums))
        for file in files_of(path)[1:]:
            if files.exists(f"{remote}/{file.name}"):
                files.get_file(f"{remote}/{file.name}", str(file))
        try:
            return verify(path)
        except CheckpointError as fault:
            logger.warning("skipped %s/%s: it %s", url, path.name, fault)
            checkpoint.remove_checkpoint(path)
    return None
