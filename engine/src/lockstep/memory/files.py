"""States of a run in shared memory: whose they are, and which are complete; torch isn't imported.

A file has a header of `HEADER_BYTES`, then the numbers of all tensors, then the containers around
them. The header is written last and cleared first, so what a killed process leaves is no state.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

from lockstep.file_systems import Lock, locked
from lockstep.run.directory import RunDirectory

SHARED_MEMORY = Path("/dev/shm")  # Linux's file system in memory; other systems have none
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK = ".lock"  # the end of the name of a file that a writer locks while it lives
FORMAT = 2
HEADER_BYTES = 1 << 15  # a path of 4,096 characters fits, also if each is escaped
SEAL_BYTES = 32  # the header's SHA-256, which comes first
BLOCK_BYTES = 1 << 16  # whose words are added up for the digest


class SharedMemoryError(Exception):
    """Why a state isn't kept in memory, or can't be read there, as the end of a sentence."""


@dataclass(frozen=True)
class Identity:
    """Whose states these are: another run, a copied directory, or another boot has none of them.

    Args:
        token: random, in the run's directory since it was created.
        run: the real path of that directory.
        boot: the kernel's name for the time since the machine started.
        device: the disk of that directory; a disk that was away may have another number.
    """

    token: str
    run: str
    boot: str
    device: int = field(default=0, compare=False)

    @classmethod
    def of(cls, directory: Path, token: str) -> Self:
        """Return the identity of the run in `directory`, on this machine."""
        path = os.path.realpath(directory)
        return cls(token, path, _boot_id(), Path(path).stat().st_dev)

    @property
    def folder(self) -> Path:
        """Where this user's states of the run are."""
        return SHARED_MEMORY / f"{_prefix()}{self.token}"


@dataclass(frozen=True)
class Header:
    """What the header of a complete state says.

    Args:
        identity: of the run.
        step: the optimizer step after which it was taken.
        containers_at: where the containers begin, counted from the end of the header.
        size: bytes after the header.
        digest: of these bytes, see `digest_of`.
        part: which part of the state it is; empty: all of it.
    """

    identity: Identity
    step: int
    containers_at: int
    size: int
    digest: str
    part: dict[str, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Return the bytes of the header, with its seal."""
        text = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        return hashlib.sha256(text).digest() + text

    @classmethod
    def unpack(cls, packed: bytes) -> Self | None:
        """Return the header in `packed`; None if it isn't sealed, or of another version."""
        text = packed[SEAL_BYTES:].rstrip(b"\0")
        if hashlib.sha256(text).digest() != packed[:SEAL_BYTES]:
            return None
        values = json.loads(text)
        if values.pop("format") != FORMAT:
            return None
        identity = Identity(**values.pop("identity"))
        return cls(identity, **values)


@dataclass(frozen=True)
class KeptState:
    """A complete state in a file."""

    path: Path
    header: Header
    parts: tuple[KeptState, ...] = ()  # the shards of all ranks, if they are to be joined

    @property
    def step(self) -> int:
        """The optimizer step after which it was taken."""
        return self.header.step

    @property
    def size(self) -> int:
        """The bytes of the state, after the headers."""
        return sum(part.header.size for part in self.parts or (self,))

    def is_here(self) -> bool:
        """Return whether this process finds the file, with this state."""
        try:
            with self.path.open("rb") as file:
                return Header.unpack(file.read(HEADER_BYTES)) == self.header
        except OSError:
            return False


def identity_of(directory: RunDirectory) -> Identity | None:
    """Return the identity of a run on this machine; None if an earlier version created it."""
    token = directory.token()
    if token is None:
        return None
    return Identity.of(directory.path, token)


def digest_of(content: Any, containers_at: int) -> str:
    """Return a digest of a state's bytes after the header, in a tenth of the time of SHA-256's.

    It is the SHA-256 of the sums of all blocks' words, and of the containers. So a change anywhere
    is seen, unless several changes in one block of 64 KiB cancel out to the last of 64 bits.

    Args:
        content: the bytes, as a buffer.
        containers_at: where the tensors end, a multiple of 8.
    """
    import numpy as np

    words = np.frombuffer(content, np.uint64, containers_at // 8)
    starts = np.arange(0, len(words), BLOCK_BYTES // 8)
    digest = hashlib.sha256(np.add.reduceat(words, starts).tobytes() if len(words) else b"")
    digest.update(memoryview(content)[containers_at:])
    return digest.hexdigest()


def states_in(identity: Identity) -> list[KeptState]:
    """Return the complete states of the run in this machine's memory, the newest first.

    Their bytes aren't verified yet.

    Raises:
        SharedMemoryError: the folder isn't this user's alone.
    """
    folder = identity.folder
    if not folder.is_dir():
        return []
    refuse_foreign(folder)
    states = [
        KeptState(path, header)
        for path, header in _headers_in(folder).items()
        if header.identity == identity
    ]
    return sorted(states, key=lambda state: state.step, reverse=True)


def _headers_in(folder: Path) -> dict[Path, Header]:
    """Return the header of each complete state.

    It opens no lock: closing one would unlock it, if this process has taken it.
    """
    headers = {}
    for path in {*folder.iterdir()} - {*folder.glob(f"*{LOCK}")}:
        with contextlib.suppress(OSError), path.open("rb") as file:  # else removed meanwhile
            header = Header.unpack(file.read(HEADER_BYTES))
            if header is not None:
                headers[path] = header
    return headers


def make_folder(identity: Identity) -> Path:
    """Return the folder for the run's states, which only this user can open; make it if needed.

    Raises:
        SharedMemoryError: there is no shared memory, or the folder is somebody else's.
    """
    folder = identity.folder
    if not SHARED_MEMORY.is_dir():
        raise SharedMemoryError(f"there is no {SHARED_MEMORY}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SharedMemoryError(f"{folder} cannot be made ({error.strerror})") from None
    refuse_foreign(folder)
    return folder


def claim_name(folder: Path) -> tuple[str, BinaryIO]:
    """Return a name for a writer's files that no living process has, and what keeps it.

    Usually it is `0`. Machines that share their memory, such as containers, have different ones.

    Raises:
        SharedMemoryError: the folder is gone, not writable, or without locks.
    """
    for number in itertools.count():
        name = str(number)
        try:
            lock = (folder / f"{name}{LOCK}").open("ab")
        except OSError as error:
            raise SharedMemoryError(f"{folder} cannot be written ({error.strerror})") from None
        match locked(partial(fcntl.lockf, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            case Lock.TAKEN:  # until this process ends
                return name, lock
            case Lock.UNSUPPORTED:
                lock.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise SharedMemoryError(f"{folder} has no locks, which tell who writes there")
            case Lock.BUSY:
                lock.close()
    raise AssertionError("there is always another number")


def is_free(lock: BinaryIO) -> bool:
    """Lock a file until it is closed, and return whether no other process has."""
    return locked(partial(fcntl.lockf, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)) is Lock.TAKEN


def refuse_foreign(folder: Path) -> None:
    """Raise a `SharedMemoryError` unless `folder` is a folder that only this user can open."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SharedMemoryError(f"{folder} belongs to another user")
    if status.st_mode & 0o077:
        raise SharedMemoryError(f"{folder} is open to other users")


def remove_states(identity: Identity) -> None:
    """Remove all states of the run from this machine's memory."""
    shutil.rmtree(identity.folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove this user's states of runs that nobody continues: done, deleted, or of another boot.

    A folder that a living process uses stays, whatever it contains.
    """
    for folder in sorted(SHARED_MEMORY.glob(f"{_prefix()}*")):
        with contextlib.suppress(OSError, SharedMemoryError):  # another command does the same
            refuse_foreign(folder)
            with contextlib.ExitStack() as until_removed:
                if _takes_all_locks(folder, until_removed) and all(
                    _is_over(header.identity) for header in _headers_in(folder).values()
                ):
                    shutil.rmtree(folder, ignore_errors=True)


def _takes_all_locks(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock `folder` until `stack` ends; return whether a process has used it, and none does."""
    locks = [*folder.glob(f"*{LOCK}")]
    return bool(locks) and all(is_free(stack.enter_context(path.open("ab"))) for path in locks)


def _is_over(identity: Identity) -> bool:
    """Return whether a run is done or deleted, or its states are from before a restart.

    A run that can't be read isn't over: its disk may be away for a moment.
    """
    boot = _boot_id()
    if boot and identity.boot != boot:
        return True
    directory = RunDirectory(Path(identity.run))
    try:
        token = directory.name_in_memory.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        ancestor = next(parent for parent in directory.path.parents if parent.is_dir())
        return ancestor.stat().st_dev == identity.device  # else its disk is away
    except (OSError, UnicodeDecodeError):
        return False
    return token != identity.token or directory.read_summary().get("status") == "done"


def _boot_id() -> str:
    """Return the kernel's name for the time since the machine started; empty if it has none."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def _prefix() -> str:
    return f"lockstep-{os.getuid()}-"
