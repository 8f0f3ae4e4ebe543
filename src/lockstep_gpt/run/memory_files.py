"""States of a run in shared memory: whose they are, and which are complete; torch isn't imported.

A file has a header of `HEADER_BYTES`, then the numbers of all tensors, then the containers around
them. The header is written last and cleared first, so what a killed process leaves is no state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from lockstep_gpt import PROGRAM

SHARED_MEMORY = Path("/dev/shm")  # Linux's file system in memory; other systems have none
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FORMAT = 1
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
    """

    token: str
    run: str
    boot: str

    @classmethod
    def of(cls, directory: Path, token: str) -> Self:
        """Return the identity of the run in `directory`, on this machine."""
        boot = ""
        with contextlib.suppress(OSError):
            boot = BOOT_ID.read_text().strip()
        return cls(token, os.path.realpath(directory), boot)

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

    @property
    def step(self) -> int:
        """The optimizer step after which it was taken."""
        return self.header.step


def new_token() -> str:
    """Return a name for a run that no other run has."""
    return secrets.token_hex(8)


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
    states = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile
            with path.open("rb") as file:
                header = Header.unpack(file.read(HEADER_BYTES))
            if header is not None and header.identity == identity:
                states.append(KeptState(path, header))
    return sorted(states, key=lambda state: state.step, reverse=True)


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


def runs_in_memory() -> Iterator[Identity]:
    """Yield the runs of this user that have states in this machine's memory, one for each folder.

    Of a folder without a complete state, only the token is known.
    """
    prefix = _prefix()
    for folder in sorted(SHARED_MEMORY.glob(f"{prefix}*")):
        token = folder.name.removeprefix(prefix)
        run = ""
        boot = ""
        for path in folder.iterdir():
            with contextlib.suppress(OSError), path.open("rb") as file:
                header = Header.unpack(file.read(HEADER_BYTES))
                if header is not None:
                    run = header.identity.run
                    boot = header.identity.boot
        yield Identity(token, run, boot)


def _prefix() -> str:
    return f"{PROGRAM}-{os.getuid()}-"
