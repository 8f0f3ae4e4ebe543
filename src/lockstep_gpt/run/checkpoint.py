"""Checkpoints on disk: complete or absent, verified when read; torch is imported lazily.

A checkpoint is `step=000500.ckpt` and its SHA-256, `step=000500.ckpt.sha256`. With
`strategy.save_parts`, each rank first writes `step=000500.RRRRR-of-WWWWW.part`. The keys:

- from Lightning: `state_dict` (the weights), `optimizer_states`, `lr_schedulers`, `callbacks`,
  `loops` (progress), `global_step`, `epoch`;
- from `Checkpoints`: `config`, `tokenizer`, `samples` and `tokens` (consumed so far);
- from `GPTModule`: `skipped` (updates);
- from `WeightHashes`: `weights` (a hash of the weights for each step that was saved);
- from `Sources`: `turns`, the rule by which a mixture's sources take turns;
- from `ShardedStrategy`: `parts`, their names; the file then has None for the shards in them.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lockstep_gpt.damaged_files import readable
from lockstep_gpt.errors import RunError, UserError, remedy_of_limit
from lockstep_gpt.run.checkpoint_content import (
    NEEDED,
    NEEDED_TO_RESUME,
    CheckpointError,
    join_parts,
    load_content,
)
from lockstep_gpt.run.checkpoint_downloads import download
from lockstep_gpt.whole_files import replace_text, replacing

logger = logging.getLogger(__name__)

NAME = re.compile(r"step=(\d{6,})\.ckpt")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of optimizer step `step` belongs."""
    return folder / f"step={step:06d}.ckpt"


def step_of(path: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    name = NAME.fullmatch(path.name)
    assert name, path
    return int(name[1])


def sum_path(path: Path) -> Path:
    """Return the file with the SHA-256 of a checkpoint."""
    return path.with_name(path.name + ".sha256")


def files_of(path: Path) -> list[Path]:
    """Return a checkpoint's files: its checksum file, the others named there, and itself."""
    others = (path.with_name(name) for name in _sums(path) if name != path.name)
    return [sum_path(path), *others, path]


def _sums(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each of a checkpoint's files; empty without a valid checksum file.

    Raises:
        PermissionError: there is one, which can't be read.
    """
    try:
        lines = sum_path(path).read_text(encoding="ascii").splitlines()
        sums = {name: digest for digest, name in map(str.split, lines)}
    except PermissionError:
        raise
    except (OSError, ValueError):
        return {}
    # A checksum file can't cause files of other names to be read or deleted.
    allowed = re.compile(rf"{re.escape(path.stem)}\.[\w.-]+")
    if not all(map(allowed.fullmatch, sums)):
        return {}
    return sums


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, by step, oldest first, or raise a `UserError`."""
    with readable(folder):  # an unreadable folder isn't an empty one
        if not folder.is_dir():
            return []
        named = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted(named, key=step_of)


def absence_of(folder: Path) -> str:
    """Return why `folder` has no checkpoints, as the end of a sentence about it."""
    if folder.is_dir():
        return "has no checkpoint"
    if folder.exists():
        return "is not a folder"
    if folder.is_symlink():
        return f"is a link to {folder.readlink()}, which is missing"
    return "is missing"


def write_checkpoint(
    content: dict[str, Any],
    path: Path,
    others: dict[str, str] | None = None,
    checksum_file: bool = True,
) -> str:
    """Write plain containers and tensors to `path`, never half a file; return its SHA-256.

    Args:
        content: what to save.
        path: the file; a previous one stays if the new one can't be written.
        others: name -> SHA-256 of the checkpoint's other files, which are next to it already.
        checksum_file: also write the checksum file; only the checkpoint itself has one.

    Raises:
        RunError: the disk is full or not writable.
    """
    import torch

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_full_disk(path.parent, size_of(content))
        with replacing(path) as file:
            torch.save(content, file)
            file.flush()
            digest = _sha256(Path(file.name))
            if checksum_file:
                sums = {path.name: digest, **(others or {})}
                # `sha256sum --check` reads this format.
                lines = (f"{hexdigest}  {name}\n" for name, hexdigest in sums.items())
                replace_text(sum_path(path), "".join(lines))
        return digest
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        reason = getattr(error, "strerror", None) or error
        remedy = remedy_of_limit(error) or "free space there, or make it writable"
        raise RunError(f"checkpoint {path} cannot be written: {reason}; {remedy}") from error


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise a `RunError` if `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"{folder} has {free:,} bytes left, but a checkpoint needs {needed:,}; "
            "free some space there"
        )


def size_of(content: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(content, dict):
        return sum(map(size_of, content.values()))
    if isinstance(content, list | tuple):
        return sum(map(size_of, content))
    return int(getattr(content, "nbytes", 0))


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint's files; the checksum last, so no file is left unverified."""
    for file in reversed(files_of(path)):
        file.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Move the files of a checkpoint to `damaged/`, or to `replaced/` if it is intact."""
    folder = path.with_name("damaged" if _any_fault_of(path, NEEDED_TO_RESUME) else "replaced")
    folder.mkdir(exist_ok=True)
    for file in filter(Path.exists, files_of(path)):
        file.replace(folder / file.name)
    logger.warning("moved %s to %s", path, folder)


def remove_leftovers(folder: Path) -> None:
    """Delete partial files of processes that were killed while writing."""
    for path in folder.glob(".step=*.tmp"):
        path.unlink()
    for part in folder.glob("step=*.part"):
        if not part.with_name(part.name.partition(".")[0] + ".ckpt").exists():
            part.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it matches its SHA-256.

    Raises:
        UserError: it can't be read, but may be intact.
    """
    try:
        return _fault_of_files(path)
    except PermissionError as error:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}; make it readable"
        ) from None
    except OSError as error:  # a failing disk
        return f"cannot be read: {error.strerror}"


def _fault_of_files(path: Path) -> str | None:
    if path.is_dir():
        return "is a folder"
    if not path.is_file():
        return "is missing"
    sums = _sums(path)
    if path.name not in sums:
        return "has no SHA-256 file next to it"
    for name, digest in sums.items():
        part = path.with_name(name)
        if not part.is_file():
            return f"lacks {name}"
        if _sha256(part) != digest:
            fault = "does not match its SHA-256"
            return fault if part == path else f"has a {name} that {fault}"
    return None


def _any_fault_of(path: Path, needed: Collection[str]) -> str | None:
    """Return what is wrong with a checkpoint's files, or else with its content; None: nothing."""
    fault = fault_of(path)
    if fault is None:
        try:
            load_content(path, needed, with_numbers=False)
        except CheckpointError as error:
            return str(error)
    return fault


def newest_valid(folder: Path, needed: Collection[str] = NEEDED) -> Path | None:
    """Return the newest intact checkpoint in `folder`; log each one that it skips.

    Args:
        folder: of a run's checkpoints.
        needed: the keys that the checkpoint must have.
    """
    for path in reversed(checkpoints_in(folder)):
        fault = _any_fault_of(path, needed)
        if fault is None:
            return path
        logger.warning("skipped %s: it %s", path, fault)
    return None


def read_checkpoint(
    path: Path, map_location: Any = "cpu", needs_sum: bool = True
) -> dict[str, Any]:
    """Load plain containers and tensors, never code, or raise a `UserError`."""
    fault = None
    if needs_sum or sum_path(path).exists() or not path.is_file():
        fault = fault_of(path)
    try:
        if fault is not None:
            raise CheckpointError(fault)
        content = load_content(path, NEEDED, map_location)
    except CheckpointError as error:
        raise UserError(
            f"checkpoint {path} {error}; use another one from the same folder"
        ) from None
    if "parts" in content:
        join_parts(content, path)
    return content


def find_checkpoint(path: Path, folder: Path | None = None) -> Path:
    """Return the checkpoint at `path`, a run's newest, or one downloaded to `folder`."""
    path = download(path, folder) or path
    with readable(path):
        is_there = path.exists()
    if not is_there:
        raise UserError(
            f"{path} does not exist; give a run directory, a checkpoint in one, or "
            "wandb://ENTITY/PROJECT/NAME:ALIAS"
        )
    if path.is_file():
        return path
    newest = newest_valid(path / "checkpoints")
    if newest is None:
        folder = path / "checkpoints"
        if checkpoints_in(folder):
            fault = "has only damaged ones"
        else:
            fault = absence_of(folder)
        raise UserError(
            f"{path} contains no valid checkpoint: {folder} {fault}; give a run that has one"
        )
    return newest
