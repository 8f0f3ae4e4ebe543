"""Checkpoints on disk: complete or absent, verified when read; torch is imported lazily.

A checkpoint is `step=000500.ckpt` and its SHA-256, `step=000500.ckpt.sha256`. With
`strategy.save_parts`, each rank first writes `step=000500.RRRRR-of-WWWWW.part`. The keys:

- from Lightning: `state_dict` (the weights), `optimizer_states`, `lr_schedulers`, `callbacks`,
  `loops` (progress), `global_step`, `epoch`;
- from `Checkpoints`: `config`, and `accumulate_grad_batches`;
- from `ValidateEvery`: `monitored` (the newest values);
- from `Metrics`: `means` (the values of each `Mean` since the last row of the log), `epoch_values`;
- from the data module: its own state, such as `Tokens` (the tokenizer and the fingerprint);
- from `WeightHashes`: `weights` (a hash of the weights for each step that was saved);
- from `Arithmetic`: `arithmetic` (what computed, from each step at which that changed);
- from `ShardedStrategy`: `parts`, their names; the file then has None for the shards in them.
"""

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoints.content import (
    NEEDED,
    TO_CONTINUE,
    CheckpointError,
    add_parts,
    joined,
    load_content,
)
from lockstep.checkpoints.downloads import download
from lockstep.checkpoints.room import (
    refuse_full_disk,
    refuse_large_file,
    size_of,
)
from lockstep.checkpoints.sums import (
    VerifiedCheckpoint,
    files_of,
    sha256_of,
    sum_path,
    verify,
)
from lockstep.damaged_files import absence_of, readable
from lockstep.errors import RunError, UserError, remedy_of_limit
from lockstep.whole_files import replace_text, replacing

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
NAME = re.compile(r"step=(\d{6,})\.ckpt")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of optimizer step `step` belongs."""
    return folder / f"step={step:06d}.ckpt"


def step_of(path: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    name = NAME.fullmatch(path.name)
    assert name, path
    return int(name[1])


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, by step, oldest first, or raise a `UserError`."""
    with readable(folder):  # an unreadable folder isn't an empty one
        if not folder.is_dir():
            return []
        named = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted(named, key=step_of)


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
        needed = size_of(content)
        refuse_full_disk(path.parent, needed)
        refuse_large_file(needed)
        with replacing(path) as file:
            torch.save(content, file)
            file.flush()
            digest = sha256_of(Path(file.name))
            if checksum_file:
                sums = {path.name: digest, **(others or {})}
                # `sha256sum --check` reads this format.
                lines = (f"{hexdigest}  {name}\n" for name, hexdigest in sums.items())
                replace_text(sum_path(path), "".join(lines))
        return digest
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or cause
        remedy = remedy_of_limit(cause) or "free space there, or make it writable"
        if not path.parent.is_dir():
            reason, remedy = f"the folder {absence_of(path.parent)}", "restore it"
        raise RunError(f"checkpoint {path} cannot be written: {reason}; {remedy}") from error


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint's files; the checksum last, so no file is left unverified."""
    for file in reversed(files_of(path)):
        file.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Move the files of a checkpoint to `damaged/`, or to `replaced/` if it is intact."""
    try:
        verify_content(path, TO_CONTINUE)
        folder = path.with_name("replaced")
    except CheckpointError:
        folder = path.with_name("damaged")
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


def verify_content(path: Path, needed: Collection[str]) -> VerifiedCheckpoint:
    """Compare a checkpoint's files with their SHA-256, then their content with what is needed.

    Raises:
        CheckpointError: what is wrong.
        UserError: a file can't be read, but may be intact.
    """
    checkpoint = verify(path)
    load_content(path, needed)
    return checkpoint


def newest_verified(folder: Path, needed: Collection[str] = NEEDED) -> VerifiedCheckpoint | None:
    """Return the newest intact checkpoint in `folder`; log each one that it skips.

    Args:
        folder: of a run's checkpoints.
        needed: the keys that the checkpoint must have.
    """
    skipped: set[Path] = set()
    while True:
        paths = [path for path in checkpoints_in(folder) if path not in skipped]
        if not paths:
            return None
        newest = paths[-1]
        try:
            return verify_content(newest, needed)
        except (CheckpointError, FileNotFoundError) as fault:
            if newest.exists():  # else, a run that is training has replaced it
                logger.warning("skipped %s: it %s", newest, fault)
        skipped.add(newest)


def newest_valid(folder: Path, needed: Collection[str] = NEEDED) -> Path | None:
    """Return the path of the newest intact checkpoint in `folder`, as `newest_verified` does."""
    newest = newest_verified(folder, needed)
    return newest.path if newest else None


def read_checkpoint(
    path: Path, map_location: Any = "cpu", needed: Collection[str] = NEEDED
) -> dict[str, Any]:
    """Load plain containers and tensors, never code, or raise a `UserError`.

    Tensors are views of the file in memory, whose pages all processes of a machine share: copy
    those that you keep.

    Args:
        path: of the checkpoint.
        map_location: where its tensors go.
        needed: the keys that it must have.
    """
    return read_verified(verify_named(path), map_location, needed=needed)


def verify_named(path: Path) -> VerifiedCheckpoint:
    """Compare a checkpoint that the user names with its SHA-256, or raise a `UserError`."""
    try:
        return verify(path)
    except CheckpointError as error:
        raise _refusal(path, error) from None


def read_verified(
    checkpoint: VerifiedCheckpoint,
    map_location: Any = "cpu",
    whole: bool = True,
    needed: Collection[str] = NEEDED,
) -> dict[str, Any]:
    """Load a verified checkpoint as `read_checkpoint` does, without reading it all again.

    Args:
        checkpoint: what `verify` has returned, in this process or in another one.
        map_location: where its tensors go.
        whole: join the shards of a checkpoint in parts, which takes memory for all of it.
        needed: the keys that the checkpoint must have.

    Raises:
        UserError: one of its files has changed since, or has other content than a checkpoint.
    """
    checkpoint.refuse_change()
    try:
        content = _read(checkpoint.path, map_location, whole, needed)
    except CheckpointError as error:
        raise _refusal(checkpoint.path, error) from None
    checkpoint.refuse_change()  # until the file was opened; what is open stays, also if deleted
    return content


def _read(path: Path, map_location: Any, whole: bool, needed: Collection[str]) -> dict[str, Any]:
    content = load_content(path, needed, map_location)
    if "parts" in content:
        add_parts(content, path)
        if whole:
            content = joined(content)
    return content


def _refusal(path: Path, fault: CheckpointError) -> UserError:
    remedy = "; use another one from the same folder"
    if path.is_file() and not sum_path(path).exists():
        remedy = ""  # the fault has one
    return UserError(f"checkpoint {path} {fault}{remedy}")


def find_checkpoint(path: Path, folder: Path | None = None) -> Path:
    """Return the checkpoint at `path`, a run's newest, or one downloaded to `folder`."""
    path = _local(path, folder)
    if path.is_file():
        return path
    return _newest_of(path).path


def with_newest(source: Path, read: Callable[[Path], Result]) -> Result:
    """Return what `read` makes of the checkpoint at `source`, or of that run's newest.

    A run that is training may replace its newest checkpoint before it is read; then, the next is.
    """
    while True:
        checkpoint = find_checkpoint(source)
        try:
            return read(checkpoint)
        except (UserError, FileNotFoundError):
            if checkpoint.exists():
                raise


def find_verified(path: Path, folder: Path | None = None) -> VerifiedCheckpoint:
    """Find a checkpoint as `find_checkpoint` does, and verify it, or raise a `UserError`."""
    path = _local(path, folder)
    if path.is_file():
        return verify_named(path)
    return _newest_of(path)


def _local(path: Path, folder: Path | None) -> Path:
    path = download(path, folder) or path
    with readable(path):
        is_there = path.exists()
    if not is_there:
        setting, _, alone = str(path).partition("=")
        if setting.isidentifier() and Path(alone).exists():  # as `ckpt_path=` elsewhere
            raise UserError(f"{path} does not exist; give the path without {setting}=: {alone}")
        raise UserError(
            f"{path} does not exist; give a run directory, a checkpoint in one, or "
            "wandb://ENTITY/PROJECT/NAME:ALIAS"
        )
    return path


def _newest_of(run: Path) -> VerifiedCheckpoint:
    folder = run if run.name == "checkpoints" else run / "checkpoints"
    newest = newest_verified(folder)
    if newest is None:
        if checkpoints_in(folder):
            fault = "has only damaged ones"
        else:
            fault = absence_of(folder)
        raise UserError(
            f"{run} contains no valid checkpoint: {folder} {fault}; give a run that has one"
        )
    return newest
