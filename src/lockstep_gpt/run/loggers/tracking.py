"""What the loggers share: a run of a tracker that follows the run in the run directory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.loggers import Logger

ENDED_WELL = ("done", "stopped early")


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
    return (logger for logger in loggers if isinstance(logger, TrackedRun))


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision of the code at `folder`, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.check_output(
            ["git", *words], cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()

    try:
        return {"git_revision": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "-s"))}
    except (OSError, subprocess.SubprocessError):
        return {}
