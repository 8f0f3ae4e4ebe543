"""The lock of a run directory, so that no two commands write to the same run.

Each process that may write holds a part of the lock until it ends: the command, rank 0, and the
other ranks. So a rank that outlives its command, on a disk that hangs or on another machine, keeps
other commands out. The system releases what a process holds when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import UserError
from lockstep.file_systems import Lock, locked

RANK_SECONDS = 5.0  # how long a rank may outlive its command or the previous start of ranks


class Part(IntEnum):
    """The byte of the lock's file that a process locks."""

    COMMAND = 0
    RANK_ZERO = 1
    OTHER_RANKS = 2  # shared: one on a machine that was lost must not hinder those that go on


RANKS = (Part.RANK_ZERO, Part.OTHER_RANKS)


class RunLock:
    """The lock of one run; forks of a process don't inherit what it holds.

    Args:
        path: the lock's file.
        run: how errors name the run.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run

    @contextlib.contextmanager
    def of_command(self) -> Iterator[None]:
        """Be the only command of this run, at most until this process ends.

        Raises:
            UserError: another command, or a rank of an earlier one, is still there.
            OSError: the file cannot be written.
        """
        with contextlib.ExitStack() as cleanup:
            file = cleanup.enter_context(self._locked_file())
            for part in RANKS:
                self._acquire(file, part, seconds=RANK_SECONDS)
                # For this command's own ranks.
                locked(partial(fcntl.lockf, file, fcntl.LOCK_UN, 1, part))
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            cleanup.callback(self._remove, file)
            yield

    def _locked_file(self) -> BinaryIO:
        """Open the file and lock the command's part."""
        while True:
            with contextlib.ExitStack() as cleanup:
                file = cleanup.enter_context(self.path.open("ab+", buffering=0))
                self._acquire(file, Part.COMMAND)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                        cleanup.pop_all()
                        return file
            # Another command has just removed it: a lock of that file keeps nobody out.

    def _remove(self, file: BinaryIO) -> None:
        """Remove the file, unless a rank still has a part of it: another file would be free."""
        for part in RANKS:
            take = partial(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, part)
            with contextlib.suppress(OSError):  # of a broken disk, which other writes tell
                if locked(take) is Lock.BUSY:
                    return
        self.path.unlink(missing_ok=True)  # it may have been removed with the run's directory

    @contextlib.contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Be a rank of this run's command, which isn't this process.

        Raises:
            UserError: this is rank 0, and an earlier rank 0 is still there.
        """
        with self.path.open("ab+", buffering=0) as file:
            if rank == 0:
                self._acquire(file, Part.RANK_ZERO, seconds=RANK_SECONDS)
            else:
                self._acquire(file, Part.OTHER_RANKS, fcntl.LOCK_SH, RANK_SECONDS)
            yield

    def _acquire(
        self, file: BinaryIO, part: Part, kind: int = fcntl.LOCK_EX, seconds: float = 0.0
    ) -> None:
        """Lock one part; wait for `seconds` while another process has it."""
        end = time.monotonic() + seconds
        while True:
            match locked(partial(fcntl.lockf, file, kind | fcntl.LOCK_NB, 1, part)):
                case Lock.TAKEN:
                    return
                case Lock.UNSUPPORTED:
                    if part == Part.COMMAND:
                        print(f"{self.run} is on a disk without locks: start it only once")
                    return
                case Lock.BUSY:
                    if time.monotonic() > end:
                        raise UserError(f"{self.run} is in use by {self._user(file, part)}")
            time.sleep(0.05)

    def _user(self, file: BinaryIO, part: Part) -> str:
        """Say who has locked a part, and what to do about it."""
        file.seek(0)
        command = file.read().decode(errors="replace") or "another process"
        wait = "wait for it to end, or stop it"
        if part == Part.COMMAND:
            return f"{command}; {wait}"
        rank = "rank 0" if part == Part.RANK_ZERO else "a rank"
        pid = _holder(file, part)
        if pid <= 0:
            return f"{rank} of {command}; {wait}"
        host = socket.gethostname()
        return f"process {pid} on {host}, {rank} of {command}; {wait}: kill -9 {pid}"


def _holder(file: BinaryIO, part: Part) -> int:
    """Return the process on this machine that has locked a part; 0 or less if it isn't here."""
    if sys.platform == "linux":
        layout = "hhqqi4x"  # of C's `struct flock`: l_type, l_whence, l_start, l_len, l_pid
        request = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, part, 1, 0)
        _, _, _, _, pid = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, request))
    else:  # macOS and BSD
        layout = "qqihh"  # l_start, l_len, l_pid, l_type, l_whence
        request = struct.pack(layout, part, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, _, _ = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, request))
    return int(pid)
