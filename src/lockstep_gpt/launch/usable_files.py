"""Refuses a resume that would fail later, because a file of the run can't be read or written."""

import errno
import tempfile
from pathlib import Path

from lockstep_gpt.damaged_files import readable
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.directory import RunDirectory


def refuse_unusable(run: RunDirectory) -> None:
    """Raise a `UserError` if a file that a resume reads or goes on writing can't be used."""
    for path in (run.metrics, run.overrides, run.log, run.summary, run.failed):
        if path.is_dir():
            raise UserError(f"{path} is a folder; move it away")
    for path in filter(Path.exists, (run.metrics, run.overrides)):
        with readable(path):
            path.open("rb").close()
    if run.log.exists():
        with run.writing(UserError):
            _refuse_unwritable(run.log)


def _refuse_unwritable(path: Path) -> None:
    try:
        path.open("ab").close()
    except PermissionError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; make it writable") from None


def refuse_unwritable_checkpoints(run: RunDirectory) -> None:
    """Raise a `UserError` if checkpoints could not be saved, before training for hours."""
    folder = run.checkpoints
    if not folder.is_dir():  # a file in its place is refused where checkpoints are looked for
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
