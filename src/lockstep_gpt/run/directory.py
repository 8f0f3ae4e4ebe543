"""What a run directory contains. The parent, rank 0, and any rank that fails may write to it."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lockstep_gpt.config import (
    Config,
    from_container,
    settings_on_resume,
    with_defaults,
    without_defaults,
)
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.run.migrations import migrate
from lockstep_gpt.whole_files import replace_text

# Bytes of the lock's file.
COMMAND_BYTE = 0
WRITER_BYTE = 1
WRITER_SECONDS = 5.0  # how long rank 0 may outlive its command
# What rank 0 decides for all ranks, and what may differ between machines.
MAY_DIFFER = ("run_dir", "run_name", "launch.node_rank", "data.fingerprint")


class RunDirectory:
    """The paths of one run, which uses one directory for any number of ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"  # locked by the writer; forks don't inherit the lock
        self.config = path / "config.yaml"  # frozen; references to the environment stay references
        self.log = path / "train.log"  # what rank 0 reported
        self.metrics = path / "metrics.csv"  # one row for each logged step
        self.summary = path / "summary.json"  # how the run ended
        self.failed = path / "failed.json"  # rank, step and error of the first failure
        self.wandb_id = path / "wandb/run_id"  # so that a resumed run continues the same W&B run
        self.overrides = path / "overrides.log"  # what each resume changed
        self.checkpoints = path / "checkpoints"  # files such as `step=000500.ckpt`
        self.rank_logs = path / "ranks"  # what ranks other than 0 printed, if they failed

    def rank_log(self, rank: int) -> Path:
        """What a rank other than 0 printed; kept if the rank failed."""
        return self.rank_logs / f"{rank}.log"

    def log_of(self, rank: int) -> Path:
        """The log of any rank."""
        return self.log if rank == 0 else self.rank_log(rank)

    def refuse_if_used(self) -> None:
        """Raise a `UserError` if it contains more than a process that was killed early leaves."""
        leftovers = {self.lock.name, f".{self.config.name}.tmp"}
        if not self.path.exists():
            return
        if self.path.is_dir() and {path.name for path in self.path.iterdir()} <= leftovers:
            return
        remedy = "name another one"
        if self.config.is_file():
            remedy += ", or continue it with resume=auto"
        raise UserError(f"run_dir={self.path} already exists and is not empty; {remedy}")

    def create(self, values: dict[str, Any]) -> None:
        """Create the directory and freeze `values`, once; use `locked` if others may write too."""
        self.refuse_if_used()
        with self.writing(UserError):
            self.path.mkdir(parents=True, exist_ok=True)
            # Atomically: other machines wait for it.
            replace_text(self.config, _as_yaml(without_defaults(values)))

    def refreeze(self, values: dict[str, Any]) -> None:
        """Replace the frozen configuration for the next part of a resumed run."""
        replace_text(self.config, _as_yaml(without_defaults(values)))
        self.failed.unlink(missing_ok=True)  # an earlier part's; train.log still reports it

    def values(self) -> dict[str, Any]:
        """Return the frozen configuration as plain values, or raise a `UserError`."""
        try:
            text = self.config.read_text(encoding="utf-8")
            frozen = dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
            return migrate(frozen)
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run directory: it has no config.yaml") from None
        except (yaml.YAMLError, AttributeError, TypeError, ValueError):
            raise UserError(f"{self.config} is damaged; restore the original") from None

    def load(self) -> Config:
        """Return the frozen configuration, checked and resolved, or raise a `UserError`."""
        return from_container(self.values(), self.config)

    def hash(self) -> str:
        """Return the SHA-256 of the frozen file, which ranks compare to see that they share it."""
        return hashlib.sha256(self.config.read_bytes()).hexdigest()

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace `summary.json` atomically, so a reader never sees half of it."""
        replace_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return `summary.json`; empty if the run didn't get that far."""
        return _read_json(self.summary)

    def resume_hint(self) -> str:
        """Say what `resume=auto` continues from."""
        newest = max(self.checkpoints.glob("step=*.ckpt"), key=os.path.getmtime, default=None)
        if newest is None:
            return "resume=auto starts over"
        return f"resume=auto continues from {newest}"

    @contextlib.contextmanager
    def writing(self, mistake: type[Exception] = RunError) -> Iterator[None]:
        """Turn an `OSError` into one line: a `RunError` if the disk is full, else a `mistake`."""
        try:
            yield
        except OSError as error:
            kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT) else mistake
            if mistake is RunError:  # in a rank, whose last line has the rest
                remedy = "fix that"
            elif self.config.exists():
                remedy = f"fix that, then {self.resume_hint()}"
            else:
                remedy = "set another run_dir, or fix that"
            raise kind(f"{error.strerror}: {self.path} cannot be written; {remedy}") from error

    def record_failure(self, failure: dict[str, Any]) -> bool:
        """Write `failed.json` if this failure is the run's first; return whether it was."""
        try:
            with self.failed.open("x", encoding="utf-8") as file:
                json.dump(failure, file, indent=2)
        except FileExistsError:
            return False
        except OSError:  # half a file isn't JSON; the terminal reports the failure
            self.failed.unlink(missing_ok=True)
        return True

    def read_failure(self) -> dict[str, Any]:
        """Return `failed.json`; empty if nothing failed."""
        return _read_json(self.failed)

    def discard(self) -> None:
        """Remove the directory of a run that never started training; keep one with checkpoints."""
        if not self.checkpoints.exists():
            shutil.rmtree(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only command of this run, at most until this process ends, or raise a `UserError`.

        The lock has two bytes: one for the command, and one for rank 0, which writes to the
        directory and may outlive a killed command by a moment.
        """
        with contextlib.ExitStack() as cleanup:
            with self.writing(UserError):
                self.path.mkdir(parents=True, exist_ok=True)
                file = cleanup.enter_context(self.lock.open("ab+", buffering=0))
                self._lock_byte(file, COMMAND_BYTE)
                self._lock_byte(file, WRITER_BYTE, WRITER_SECONDS)
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.lockf(file, fcntl.LOCK_UN, 1, WRITER_BYTE)  # for rank 0
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            cleanup.callback(self.lock.unlink, missing_ok=True)  # `discard` may have removed it
            yield

    @contextlib.contextmanager
    def writer_locked(self) -> Iterator[None]:
        """Be the only process that writes to the run, as rank 0, or raise a `UserError`."""
        with self.lock.open("ab", buffering=0) as file:
            self._lock_byte(file, WRITER_BYTE, WRITER_SECONDS)
            yield

    def _lock_byte(self, file: BinaryIO, byte: int, seconds: float = 0.0) -> None:
        """Lock one byte of the lock's file; wait for `seconds` while another process has it."""
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):
                if time.monotonic() < end:
                    time.sleep(0.05)
                    continue
                user = self.lock.read_text() or "another process"
                raise UserError(
                    f"run_dir={self.path} is in use by {user}; wait for it to end, or stop it"
                ) from None
            except OSError as error:  # a file system without locks
                if byte == COMMAND_BYTE:
                    print(f"run_dir={self.path} cannot be locked ({error.strerror}): run it once")
            return


def literal(node: Any) -> Any:
    """Escape references, because a foreign file's could read this machine's environment."""
    if isinstance(node, dict):
        return {name: literal(value) for name, value in node.items()}
    if isinstance(node, list):
        return [literal(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", node)
    return node


def _as_yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def differences(
    theirs: dict[str, Any], ours: dict[str, Any], free: tuple[str, ...] = MAY_DIFFER
) -> list[str]:
    """List the settings that differ between two frozen configurations, with both values."""
    left = dict(flat(with_defaults(theirs)))
    right = dict(flat(with_defaults(json.loads(json.dumps(ours)))))
    return [
        f"{name}={right.get(name)} instead of {left.get(name)}"
        for name in {**left, **right}
        if left.get(name) != right.get(name) and not name.startswith(free)
    ]


def refuse_another_identity(where: str, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise a `UserError` if settings that a run keeps differ between `saved` and `ours`."""
    current = dict(flat(with_defaults(ours)))
    identity = settings_on_resume("kept", current.get("data._target_"))
    # Settings that were null, or that an earlier version didn't have, are still open.
    decided = {
        name: value
        for name, value in flat(with_defaults(migrate(saved)))
        if name in identity and value is not None
    }
    differing = differences(decided, {name: current.get(name) for name in decided}, free=())
    if differing:
        raise UserError(
            f"{where} keeps its settings, but got {some_of(differing)}; use the same, or set "
            "resume_force=true"
        )


def some_of(differing: list[str]) -> str:
    """Name the first three and count the others."""
    text = ", ".join(differing[:3])
    if len(differing) > 3:
        text += f" and {len(differing) - 3} more"
    return text


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting's full name and its value."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
