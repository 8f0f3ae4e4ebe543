"""Small runs on this machine that a drill starts, watches, and kills."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep import project
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.run.directory import RunDirectory
from lockstep.testing.assertion import completed
from lockstep.testing.experiment import LIMIT, POLL, joined, processes_left


class SmallRuns:
    """Runs of one small experiment below `folder`.

    Args:
        folder: for the runs.
        settings: of all of them.
        overrides: that choose the experiment.
    """

    def __init__(self, folder: Path, settings: Sequence[str], overrides: Sequence[str]) -> None:
        self.folder = folder
        self.words = joined(completed(overrides, None), settings)

    def directory(self, name: str) -> RunDirectory:
        """Return the directory of a run."""
        return RunDirectory(self.folder / name)

    def start(self, name: str, *overrides: str, resume: bool = False) -> subprocess.Popen[str]:
        """Start a run, or resume it; `overrides` are single settings."""
        words = ["resume=auto", "trust_run_dir=true"] if resume else self.words
        run = f"run_dir={self.folder / name}"
        return subprocess.Popen(
            project.current().command("train", *joined(words, [run, *overrides])),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, name: str, *overrides: str, resume: bool = False) -> tuple[int, str]:
        """Train to the end; return the exit status and the error output."""
        process = self.start(name, *overrides, resume=resume)
        try:
            _, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        return process.returncode, errors

    def steps_of(self, name: str) -> int:
        """Return the last step that a run has logged; 0 before the first row."""
        metrics = self.directory(name).metrics
        rows = read_metrics(metrics).as_dicts() if metrics.is_file() else []
        return int(rows[-1][STEP]) if rows else 0

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until a run has logged a step, its process has ended, or LIMIT is over."""
        self.wait_until(lambda: self.steps_of(name) >= step, process)

    def wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        """Wait until a condition is true, a run's process has ended, or LIMIT is over."""
        end = time.monotonic() + LIMIT
        while not condition() and process.poll() is None and time.monotonic() < end:
            time.sleep(POLL)

    def gone(self, name: str) -> int:
        """Wait some seconds for the run's processes to end; return how many are left."""
        return processes_left(self.folder / name)
