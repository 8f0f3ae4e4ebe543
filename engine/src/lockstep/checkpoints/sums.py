"""Which files a checkpoint has, and whether they are intact: a SHA-256 for each of them."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import is_zipfile

from lockstep.checkpoints.content import CheckpointError, load_content
from lockstep.errors import UserError


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that matched its SHA-256, and marks that its files keep until one is replaced.

    Args:
        path: the checkpoint.
        sums: name -> SHA-256 of each of its files.
        marks: of each file before it was read, its inode, size, and time of change in ns.
    """

    path: Path
    sums: dict[str, str]
    marks: tuple[tuple[int, int, int], ...]

    @cached_property
    def step(self) -> int:
        """The optimizer step: in a name such as `step=000500.ckpt`, else in the content."""
        name = re.fullmatch(r"step=(\d+)", self.path.stem)
        if name:
            return int(name[1])
        return int(load_content(self.path, ["global_step"])["global_step"])

    def is_unchanged(self) -> bool:
        """Return whether the files that this process finds are those that were verified."""
        try:
            return self.marks == tuple(_mark(self.path.with_name(name)) for name in self.sums)
        except OSError:  # one is missing
            return False

    def refuse_change(self) -> None:
        """Raise a `UserError` if a file has been replaced, changed, or deleted."""
        if not self.is_unchanged():
            raise UserError(
                f"the files of checkpoint {self.path} are not those that were verified a moment "
                "ago; repeat the command when nothing else changes them"
            )


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


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256, which takes a read of the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def fault_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it matches its SHA-256.

    Raises:
        UserError: it can't be read, but may be intact.
    """
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return None


def verify(path: Path) -> VerifiedCheckpoint:
    """Compare a checkpoint's files with their SHA-256.

    Raises:
        CheckpointError: what is wrong.
        UserError: a file can't be read, but may be intact.
    """
    try:
        return _verify_files(path)
    except PermissionError as error:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}; make it readable"
        ) from None
    except OSError as error:  # a failing disk
        raise CheckpointError(f"cannot be read: {error.strerror}") from None


def _fault_without_sum(path: Path) -> str:
    """Return the fault of a file without a valid checksum file, and what to do."""
    if not is_zipfile(path):
        return "is not a checkpoint; give a run directory, or a file step=N.ckpt in its checkpoints"
    parts = sorted(part.name for part in path.parent.glob(f"{path.stem}.*.part"))
    folder = shlex.quote(str(path.parent))
    command = f"sha256sum {shlex.join([path.name, *parts])} > {shlex.quote(sum_path(path).name)}"
    return (
        f"has no SHA-256 file next to it; copy {sum_path(path).name}, too, or if you are sure that "
        f"the file is intact: cd {folder} && {command}"
    )


def _verify_files(path: Path) -> VerifiedCheckpoint:
    if path.is_dir():
        raise CheckpointError("is a folder")
    if not path.is_file():
        raise CheckpointError("is missing")
    sums = _sums(path)
    if path.name not in sums:
        raise CheckpointError(_fault_without_sum(path))
    marks = []
    for name, digest in sums.items():
        file = path.with_name(name)
        if not file.is_file():
            raise CheckpointError(f"lacks {name}")
        marks.append(_mark(file))  # first, so a file that replaces it meanwhile has another
        if sha256_of(file) == digest:
            continue
        fault = "does not match its SHA-256"
        if file != path:
            fault = f"has a {name} that {fault}"
        raise CheckpointError(fault)
    return VerifiedCheckpoint(path, sums, tuple(marks))
