"""What a run directory contains. The parent, rank 0, and any rank that fails may write to it."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.damaged_files import read_object, readable
from lockstep.errors import RunError, UserError
from lockstep.file_systems import lacks_links
from lockstep.run.frozen_file import frozen_text, read_frozen
from lockstep.run.lock import RunLock
from lockstep.whole_files import replace_text

logger = logging.getLogger(__name__)

# Of the entries that this program reads again.
SUMMARY_TYPES: dict[str, Any] = {
    "status": str,
    "step": int,
    "last_checkpoint": str | None,
    "val_loss": int | float | None,
    "monitored_value": int | float | None,
}
PLAIN_REFERENCE = re.compile(r"\$\{[^${}:]+\}")  # to another setting, such as `${model.block_size}`
# How a configuration refers to the directory of its run, with a name of Hydra's.
OUTPUT_DIR = "${hydra:runtime.output_dir}"
# What rank 0 decides for all ranks, and what may differ between machines.
MAY_DIFFER = ("run_dir", "run_name", "launch.node_rank")


class RunDirectory:
    """The paths of one run, which uses one directory for any number of ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = RunLock(path / ".lock", f"run_dir={path}")
        self.config = path / "config.yaml"  # frozen; references to the environment stay references
        self.log = path / "train.log"  # what rank 0 reported
        self.metrics = path / "metrics.csv"  # one row for each logged step
        self.trace = path / "trace.csv"  # the bits of each step, with the callback `Trace`
        self.summary = path / "summary.json"  # how the run ended
        self.failed = path / "failed.json"  # rank, step and error of the first failure
        self.environment = path / "environment.json"  # where it runs, with `RecordEnvironment`
        self.decided = path / "decided.json"  # values that the run has decided at its first start
        self.wandb_id = path / "wandb/run_id"  # so that a resumed run continues the same W&B run
        self.overrides = path / "overrides.log"  # what each resume changed
        self.checkpoints = path / "checkpoints"  # files such as `step=000500.ckpt`
        self.saved = path / ".saved"  # exists once there has been a checkpoint
        self.name_in_memory = path / ".token"  # of its states in memory; no other run has it
        self.rank_logs = path / "ranks"  # what ranks other than 0 printed, if they failed
        self.others: set[str] = set()  # names of files that are there before the run begins
        self._reported: set[Path] = set()  # damaged files that only inform

    def rank_log(self, rank: int) -> Path:
        """What a rank other than 0 printed; kept if the rank failed."""
        return self.rank_logs / f"{rank}.log"

    def log_of(self, rank: int) -> Path:
        """The log of any rank."""
        return self.log if rank == 0 else self.rank_log(rank)

    def refuse_if_used(self) -> None:
        """Raise a `UserError` if it contains more than a process that was killed early leaves."""
        leftovers = {
            self.lock.path.name,
            f".{self.config.name}.tmp",
            self.name_in_memory.name,
            f".{self.name_in_memory.name}.tmp",
            *self.others,
        }
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"run_dir={self.path} is a file; name a folder, or a new path")
        if {path.name for path in self.path.iterdir()} <= leftovers:
            return
        remedy = "name another one"
        if self.config.is_file():
            remedy += ", or continue it with resume=auto"
        elif self.checkpoints.is_dir():
            remedy += f" and add resume={self.path}, or restore {self.config}"
        raise UserError(f"run_dir={self.path} already exists and is not empty; {remedy}")

    def create(self, values: dict[str, Any]) -> None:
        """Create the directory and freeze `values`, once; use `locked` if others may write too."""
        self.refuse_if_used()
        with self.writing(UserError):
            self.path.mkdir(parents=True, exist_ok=True)
            self._name_in_memory()
            # Atomically, and last: other machines wait for it.
            replace_text(self.config, frozen_text(values))

    def _name_in_memory(self) -> None:
        replace_text(self.name_in_memory, f"{secrets.token_hex(8)}\n")

    def token(self) -> str | None:
        """Return the name that the run's states in memory have; None if there is none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            token = self.name_in_memory.read_text(encoding="ascii").strip()
            if token.isalnum():  # it becomes part of a path
                return token
        return None

    def refreeze(self, values: dict[str, Any]) -> None:
        """Replace the frozen configuration for the next part of a resumed run."""
        if self.token() is None:  # an earlier version created the run
            self._name_in_memory()
        replace_text(self.config, frozen_text(values))
        self.failed.unlink(missing_ok=True)  # an earlier part's; train.log still reports it

    def values(self) -> dict[str, Any]:
        """Return the frozen configuration as plain values, or raise a `UserError`."""
        return read_frozen(self.config)

    def placed(self) -> dict[str, Any]:
        """Return the frozen configuration, with the run's path where it refers to that."""
        return cast(dict[str, Any], _placed(self.values(), str(self.path.absolute())))

    def resolved(self) -> dict[str, Any]:
        """Return the frozen configuration with all references to the environment resolved.

        Raises:
            UserError: it is damaged, or a variable of the environment is not set.
        """
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(self.placed()), resolve=True)
        except OmegaConfBaseException as error:
            line = str(error).splitlines()[0]
            raise UserError(f"{self.config}: {error.full_key}: {line}; set it") from None
        return cast(dict[str, Any], resolved)

    def hash(self) -> str:
        """Return the SHA-256 of the frozen file, which ranks compare to see that they share it."""
        with readable(self.config):
            return hashlib.sha256(self.config.read_bytes()).hexdigest()

    def has_begun(self) -> bool:
        """Return whether rank 0 has come to the first step of its first start."""
        return self.metrics.exists()

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace `summary.json` atomically, so a reader never sees half of it."""
        replace_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return `summary.json`; empty if the run didn't get that far, or the file is damaged."""
        summary = self._read_informative(self.summary)
        for name, kind in SUMMARY_TYPES.items():
            if name in summary and not isinstance(summary[name], kind):
                self._ignore(self.summary, f"has {name}={summary[name]}")
                return {}
        return summary

    def notes(self) -> dict[str, Any]:
        """Return what the run has decided once, by name."""
        content, fault = read_object(self.decided)
        if fault:
            raise UserError(f"{self.decided} {fault}; restore the original")
        return content

    def note(self, name: str, value: Any) -> None:
        """Keep a value that the run has decided, for its later starts."""
        with self.writing():
            replace_text(self.decided, json.dumps({**self.notes(), name: value}, indent=2) + "\n")

    def _read_informative(self, path: Path) -> dict[str, Any]:
        content, fault = read_object(path)
        if fault:
            self._ignore(path, fault)
        return content

    def _ignore(self, path: Path, fault: str) -> None:
        """Log, once, that a file is damaged which only informs."""
        if path not in self._reported:
            logger.warning("%s %s; ignored", path, fault)
            self._reported.add(path)

    def note_save(self) -> None:
        """Remember that there has been a checkpoint: `resume=auto` then never starts over."""
        if not self.saved.exists():
            with contextlib.suppress(OSError):  # only a safeguard
                replace_text(self.saved, "this run has saved checkpoints\n")

    def has_saved(self) -> bool:
        """Return whether the run has ever saved a checkpoint, wherever it is now."""
        return self.saved.exists() or bool(self.read_summary().get("last_checkpoint"))

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
            path: Any = self.path
            if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
                path = error.filename2 or error.filename or path  # what is in the place of another
            raise kind(f"{error.strerror}: {path} cannot be written; {remedy}") from error

    def record_failure(self, failure: dict[str, Any]) -> bool:
        """Write `failed.json` if this failure is the run's first; return whether it was.

        The file is whole or absent, and of several ranks that fail at once, one writes it.
        """
        own = self.path / f".{self.failed.name}.{socket.gethostname()}.{os.getpid()}.tmp"
        try:
            with own.open("w", encoding="utf-8") as file:
                json.dump(failure, file, indent=2)
            os.link(own, self.failed)
        except FileExistsError:
            return False
        except OSError as error:
            if lacks_links(error):
                return self._record_in_place(own)
            return not self.failed.exists()  # a full disk; the terminal reports the failure
        finally:
            with contextlib.suppress(OSError):
                own.unlink()
        return True

    def _record_in_place(self, own: Path) -> bool:
        """Write `failed.json` where there are no hard links; return whether nobody else has."""
        try:
            with self.failed.open("xb") as file:
                file.write(own.read_bytes())
        except OSError:
            return False
        return True

    def forget_failure(self, rank: int) -> None:
        """Remove `failed.json` if this rank has written it."""
        with contextlib.suppress(OSError, ValueError):
            if self.read_failure().get("rank") == rank:
                self.failed.unlink()

    def read_failure(self) -> dict[str, Any]:
        """Return `failed.json`; empty if nothing failed."""
        return self._read_informative(self.failed)

    def discard(self) -> None:
        """Remove the directory of a run that never started training; keep what isn't ours."""
        if not self.checkpoints.exists() and not self.has_more():
            shutil.rmtree(self.path)

    def has_more(self) -> bool:
        """Return whether a program has written files of its own to the directory."""
        ours = {path.name for path in vars(self).values() if isinstance(path, Path)} | self.others
        with contextlib.suppress(OSError):
            names = {path.name for path in self.path.iterdir() if path.name[0] != "."}
            return not names <= {*ours, self.wandb_id.parent.name}
        return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only command of this run, at most until this process ends, or raise a `UserError`.

        Ranks of an earlier command that have not ended keep the run locked, too.
        """
        with contextlib.ExitStack() as lock:
            with self.writing(UserError):
                self.path.mkdir(parents=True, exist_ok=True)
                lock.enter_context(self.lock.of_command())
            yield


def _placed(node: Any, path: str) -> Any:
    """Return a value in which a run's path stands where a program refers to it."""
    if isinstance(node, dict):
        return {name: _placed(value, path) for name, value in node.items()}
    if isinstance(node, list):
        return [_placed(value, path) for value in node]
    return node.replace(OUTPUT_DIR, path) if isinstance(node, str) else node


def settled(values: dict[str, Any]) -> dict[str, Any]:
    """Return plain values in which references to other settings are replaced by what they mean.

    Nothing is called: a reference that would, such as to the environment, is a text in the result,
    and so is one that leads nowhere. The values may be someone else's.
    """
    try:
        return cast(dict[str, Any], _settled(OmegaConf.create(_without_calls(values))))
    except RecursionError:
        raise UserError("a setting refers to itself; correct it") from None


def _settled(node: Any) -> Any:
    if isinstance(node, ListConfig):
        return [_settled_child(node, index) for index in range(len(node))]
    if isinstance(node, DictConfig):
        return {key: _settled_child(node, key) for key in node}
    return node


def _settled_child(parent: Any, key: Any) -> Any:
    try:
        return _settled(parent[key])
    except OmegaConfBaseException:
        return OmegaConf.to_container(parent, resolve=False)[key]  # type: ignore[call-overload,index]


def _without_calls(node: Any) -> Any:
    """Escape references that call a function; those to other settings stay."""
    if isinstance(node, dict):
        return {name: _without_calls(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_without_calls(value) for value in node]
    if isinstance(node, str) and "${" in PLAIN_REFERENCE.sub("", node):
        return literal(node)
    return node


def literal(node: Any) -> Any:
    """Escape references, because a foreign file's could read this machine's environment."""
    if isinstance(node, dict):
        return {name: literal(value) for name, value in node.items()}
    if isinstance(node, list):
        return [literal(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", node)
    return node


def differences(
    theirs: dict[str, Any], ours: dict[str, Any], free: tuple[str, ...] = MAY_DIFFER
) -> list[str]:
    """List the settings that differ between two frozen configurations, with both values."""
    left = dict(flat(theirs))
    right = dict(flat(json.loads(json.dumps(ours))))
    return [
        f"{name}={right.get(name)} instead of {left.get(name)}"
        for name in {**left, **right}
        if left.get(name) != right.get(name) and not name.startswith(free)
    ]


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
            yield f"{prefix}{name}", value
