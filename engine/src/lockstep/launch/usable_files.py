"""Refuses a resume that would fail later, because a file of the run can't be read or written."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.checkpoints.reading import checkpoints_in
from lockstep.damaged_files import is_special, readable, refuse_misplaced
from lockstep.errors import UserError
from lockstep.launch.hydra_job import HYDRA_FILE
from lockstep.memory.ending import state_left
from lockstep.run.directory import RunDirectory


def refuse_unusable(run: RunDirectory) -> None:
    """Raise a `UserError` if a file that a resume reads or goes on writing can't be used."""
    for path in (run.metrics, run.overrides, run.log, run.summary, run.failed):
        if path.is_dir():
            raise UserError(f"{path} is a folder; move it away")
        if is_special(path):
            raise UserError(f"{path} is not a file; move it away")
    hydra_folder = run.path / HYDRA_FILE.parent
    if hydra_folder.exists() and not hydra_folder.is_dir():
        raise UserError(f"{hydra_folder} is not a folder; move it away")
    for path in filter(Path.exists, (run.metrics, run.overrides)):
        with readable(path):
            path.open("rb").close()
    if run.log.exists():
        with run.writing(UserError):
            _refuse_unwritable(run.log)
    with _naming_memory(run):
        refuse_misplaced(run.checkpoints)
        checkpoints_in(run.checkpoints)  # may be unreadable


@contextlib.contextmanager
def _naming_memory(run: RunDirectory) -> Iterator[None]:
    """Also say in a refusal that the run's newest state is safe.

    Memory has all that a resume needs. But a run that can't save would fail at its next save, and
    then lose that state, too; here, a person can mend the folder first.
    """
    try:
        yield
    except UserError as error:
        kept = state_left(run)
        if kept is None:
            raise
        step = f"step {kept.step} stays in this machine's memory"
        raise UserError(f"{error}; {step}, and the same command continues from it") from None


def _refuse_unwritable(path: Path) -> None:
    try:
        path.open("ab").close()
    except PermissionError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; make it writable") from None


def refuse_unwritable_checkpoints(run: RunDirectory) -> None:
    """Raise a `UserError` if checkpoints could not be saved, before training for hours."""
    with _naming_memory(run):
        _refuse_unwritable_folder(run.checkpoints)


def _refuse_unwritable_folder(folder: Path) -> None:
    if not folder.is_dir():  # the first save makes it
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".try-"):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return  # it is the whole disk, which freezing the configuration reports
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); make it a folder that you may write"
        ) from None
