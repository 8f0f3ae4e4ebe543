"""Checkpoints on disk: complete or absent, verified when read; torch is imported lazily.

A checkpoint is `step=000500.ckpt` and its SHA-256, `step=000500.ckpt.sha256`. With
`strategy.save_parts`, each rank first writes `step=000500.RRRRR-of-WWWWW.part`. The keys:

- from Lightning: `state_dict` (the weights), `optimizer_states`, `lr_schedulers`, `callbacks`,
  `loops` (progress), `global_step`, `epoch`;
- from `Checkpoints`: `config`, `tokenizer`, `samples` and `tokens` (consumed so far);
- from `GPTModule`: `skipped` (updates);
- from `WeightHashes`: `weights` (a hash of the weights for each step that was saved);
- from `ShardedStrategy`: `parts`, their names; the file then has None for the shards in them.
"""

import hashlib
import logging
import pickle
import re
import shutil
import struct
from pathlib import Path
from typing import Any

from lockstep_gpt.errors import RunError, UserError, remedy_of_limit
from lockstep_gpt.run.checkpoint_downloads import download
from lockstep_gpt.whole_files import replace_text, replacing

logger = logging.getLogger(__name__)

# The errors that torch raises for a file it cannot read.
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, struct.error)
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
    """Return the SHA-256 of each of a checkpoint's files; empty without a valid checksum file."""
    try:
        lines = sum_path(path).read_text(encoding="ascii").splitlines()
        sums = {name: digest for digest, name in map(str.split, lines)}
    except (OSError, ValueError):
        return {}
    # A checksum file can't cause files of other names to be read or deleted.
    allowed = re.compile(rf"{re.escape(path.stem)}\.[\w.-]+")
    if not all(map(allowed.fullmatch, sums)):
        return {}
    return sums


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, by step, oldest first."""
    named = (path for path in folder.glob("*.ckpt") if NAME.fullmatch(path.name))
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
    folder = path.with_name("damaged" if fault_of(path) else "replaced")
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
    """Return what is wrong with a checkpoint; None if it matches its SHA-256."""
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


def newest_valid(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in `folder`; log each one that it skips."""
    for path in reversed(checkpoints_in(folder)):
        fault = fault_of(path)
        if fault is None:
            return path
        logger.warning("skipped %s: it %s", path, fault)
    return None


def read_checkpoint(
    path: Path, map_location: Any = "cpu", needs_sum: bool = True
) -> dict[str, Any]:
    """Load plain containers and tensors, never code, or raise a `UserError`."""
    import torch

    if needs_sum or sum_path(path).exists() or not path.is_file():
        fault = fault_of(path)
        if fault is not None:
            raise UserError(f"checkpoint {path} {fault}; use another one from the same folder")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"checkpoint {path} has more than tensors and values: {reason}") from None
    if not isinstance(content, dict) or not {"config", "tokenizer", "state_dict"} <= set(content):
        raise UserError(f"checkpoint {path} was not written by lockstep-gpt train")
    if "parts" in content:
        _join_parts(content, path)
    return content


def find_checkpoint(path: Path, folder: Path | None = None) -> Path:
    """Return the checkpoint at `path`, a run's newest, or one downloaded to `folder`."""
    path = download(path, folder) or path
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give a run directory, a checkpoint in one, or "
            "wandb://ENTITY/PROJECT/NAME:ALIAS"
        )
    if path.is_file():
        return path
    newest = newest_valid(path / "checkpoints")
    if newest is None:
        raise UserError(f"{path} contains no valid checkpoint; give a run that has saved one")
    return newest


def _join_parts(content: dict[str, Any], path: Path) -> None:
    """Join the ranks' parts, which are next to the checkpoint `path`, and put them in `content`."""
    import torch

    names = content.pop("parts")
    parts = [torch.load(path.with_name(name), weights_only=True, mmap=True) for name in names]
    _join_shards(content, parts)


def _join_shards(content: Any, parts: list[dict[Any, Any]]) -> None:
    """Put into nested containers the tensors whose shards are at the same place in `parts`.

    Shards are slices along the first dimension, in the order of the ranks.
    """
    import torch

    for key, first_shard in parts[0].items():
        shards = [part[key] for part in parts]
        if isinstance(first_shard, torch.Tensor):
            content[key] = torch.cat(shards)
        else:
            _join_shards(content[key], shards)
