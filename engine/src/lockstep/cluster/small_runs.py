"""Small runs on this machine that a drill starts, watches, and kills."""

from __future__ import annotations

import asyncio
import csv
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from lockstep import project
from lockstep.run.directory import RunDirectory
from lockstep.testing.experiment import processes_of

# A row of metrics.csv every three steps: most runs stop between two rows.
EXPERIMENT = ["experiment=smoke", "logger=none", "model.dropout=0.1", "log_every=3"]
LIMIT = 600  # longest time for any one run, in seconds
POLL = 0.05


class SmallRuns:
    """Runs of one small experiment below `folder`, with their own corpus."""

    def __init__(self, folder: Path, settings: list[str], overrides: list[str]) -> None:
        self.folder = folder
        self.corpus = folder / "corpus"  # some modules of the standard library
        modules = Path(asyncio.__file__).parent.glob("*.py")
        self.corpus.mkdir()
        for module in modules:
            shutil.copy(module, self.corpus)
        choices = ["trainer=cpu", "data=text", f"data.source.path={self.corpus}"]
        chosen = {word.partition("=")[0].partition(".")[0] for word in overrides}
        place = [word for word in choices if word.partition("=")[0].partition(".")[0] not in chosen]
        data = f"data.root={folder / 'data'}"
        self.words = [*EXPERIMENT, *place, *settings, data, *overrides]

    def directory(self, name: str) -> RunDirectory:
        """Return the directory of a run."""
        return RunDirectory(self.folder / name)

    def start(self, name: str, *overrides: str, resume: bool = False) -> subprocess.Popen[str]:
        """Start a run, or resume it; `overrides` are single settings."""
        run = f"run_dir={self.folder / name}"
        words = ["resume=auto", "trust_run_dir=true"] if resume else self.words
        command = project.current().command("train")
        return subprocess.Popen(
            [*command, *words, run, *overrides],
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
        if not metrics.is_file():
            return 0
        complete_lines = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        rows = list(csv.DictReader(complete_lines))
        return int(rows[-1]["trainer/step"]) if rows else 0

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until a run has logged a step, its process has ended, or LIMIT is over."""
        self.wait_until(lambda: self.steps_of(name) >= step, process)

    def wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        """Wait until a condition is true, a run's process has ended, or LIMIT is over."""
        end = time.monotonic() + LIMIT
        while not condition() and process.poll() is None and time.monotonic() < end:
            time.sleep(POLL)

    def gone(self, name: str) -> int:
        """Wait up to ten seconds for the run's processes to end; return how many are left."""
        end = time.monotonic() + 10
        left = processes_of(self.folder / name)
        while left and time.monotonic() < end:
            time.sleep(POLL)
            left = processes_of(self.folder / name)
        return left
