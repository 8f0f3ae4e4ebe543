"""What the loggers share: a run of a tracker that follows the run in the run directory."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.loggers import Logger

from lockstep.run.directory import RunDirectory
from lockstep.whole_files import replace_text

logger = logging.getLogger(__name__)

ENDED_WELL = ("done", "stopped early")
RUN_ID = r"\w{1,64}"  # of trackers whose logger takes a `run_id`: MLflow's has 32 digits
WANDB_ID = r"[^/\\#?%:\s\x00-\x1f\x7f-\x9f]{1,64}"  # what wandb accepts


@runtime_checkable
class TrackedRun(Protocol):
    """A Lightning logger that also takes tables and pages, and learns how the run ended.

    It gets the run's configuration when it is made, not through `log_hyperparams`. Only rank 0 has
    loggers.
    """

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], *, step: int) -> None:
        """Log the rows `data` of the table `key`."""

    def log_html(self, key: str, html: str, step: int) -> None:
        """Log a page."""

    def close(self, status: str) -> None:
        """End the tracker's run as `done`, `stopped early`, `stopped`, or `failed`."""

    def next_commands(self) -> list[str]:
        """Return the commands that show or upload what is on this machine."""


def tracked_runs(loggers: Iterable[Logger]) -> Iterator[TrackedRun]:
    """Yield the tracked runs among `loggers`."""
    return (run for run in loggers if isinstance(run, TrackedRun))


def read_id(path: Path, pattern: str) -> str | None:
    """Return the id that a tracker's run has in the file `path`.

    Args:
        path: the file.
        pattern: what an id looks like.

    Returns:
        None without a file, or if a crash or a damaged disk has left something else in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if re.fullmatch(pattern, text) is None:
        return None
    return text


def known_id(path: Path, pattern: str) -> str | None:
    """Return the id as `read_id` does; warn if there is a file without one."""
    known = read_id(path, pattern)
    if known is None and path.exists():
        logger.warning("%s is damaged; the tracker gets a new run", path)
    return known


class ContinuedRun:
    """Which run of a tracker a logger of Lightning continues, if its class takes a `run_id`.

    Args:
        directory: the run, which has the id after its first start.
        name: of the tracker, as in `logger=mlflow`.
        kind: the logger's class.
    """

    def __init__(self, directory: RunDirectory, name: str, kind: Callable[..., Any]) -> None:
        self._file = directory.path / f"{name}_run_id"
        self._takes_id = "run_id" in inspect.signature(kind).parameters
        self.run_id = known_id(self._file, RUN_ID) if self._takes_id else None

    def remember(self, run: Logger) -> None:
        """Write the id of a run that has just started, which is the logger's version."""
        if self._takes_id:
            replace_text(self._file, str(run.version))


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision of the code at `folder`, and whether files differ from it.

    Variables that name another repository, as in a hook of git, don't count.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")
    }

    def git(*words: str) -> str:
        return subprocess.check_output(
            ["git", *words], cwd=folder, env=kept, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()

    try:
        return {"git_revision": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "-s"))}
    except (OSError, subprocess.SubprocessError):
        return {}
