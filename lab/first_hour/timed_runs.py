"""Real runs of the project's own command, and what they say about themselves."""

from __future__ import annotations

import csv
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import tokens_of
from measuring import Failure, Job

COMMAND = (sys.executable, "-m", "lockstep_gpt")
OPTIMIZER_STEPS = 30
# Speed alone: no validation, whose graph takes half a minute to compile.
SPEED = (
    "callbacks.sample=null",
    "+trainer.limit_val_batches=0",
    "checkpoint.every=null",
    "checkpoint.keep_best=0",
    "log_every=5",
    "schedule.warmup=1",
)
TINY = (
    "compile=false",
    "model.n_layer=2",
    "model.n_embd=48",
    "model.n_head=8",  # of which the heads of keys in each preset are a divisor
    "model.block_size=64",
    "batch.micro_size=1",
    "batch.global_size=4",
    "log_every=1",
    "max_steps=4",
)


@dataclass
class Run:
    """A run directory after its end, and what the run has printed."""

    folder: Path
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        return dict(json.loads((self.folder / "summary.json").read_text("utf-8")))

    @property
    def last_hash(self) -> str:
        """The hash of the last checkpoint's weights."""
        hashes: dict[str, str] = self.summary["weights"]
        return hashes[max(hashes, key=int)]

    @property
    def tokens_per_second(self) -> float:
        """The median over rows of metrics.csv; the first has the compilation."""
        return statistics.median(float(row["throughput/tokens_per_second"]) for row in self._rows())

    @property
    def utilization(self) -> float:
        """The MFU at `tokens_per_second`: both are of the same step. 0 if the peak is unknown."""
        last = self._rows()[-1]
        share = float(last.get("throughput/mfu") or 0)
        return share * self.tokens_per_second / float(last["throughput/tokens_per_second"])

    def _rows(self) -> list[dict[str, str]]:
        with (self.folder / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["train/loss"]]
        return rows[1:] or rows

    def speed(self) -> str:
        """Return the figures of a run that was only for speed."""
        summary = self.summary
        return (
            f"{self.tokens_per_second:,.0f} tok/s, MFU {self.utilization:.1%}, "
            f"peak {summary['peak_memory_gb']:.1f} GB, "
            f"first step {summary['first_step_seconds']:.0f} s, loss {summary['train_loss']:.4f}"
        )

    def receipt(self, *names: str) -> str:
        """Return these lines of what the run printed before training."""
        found = [re.search(rf"^  {name}  +(.+)$", self.output, re.MULTILINE) for name in names]
        return "; ".join(match[1] for match in found if match)


def train(job: Job, *words: str, name: str = "", **environment: str) -> Run:
    """Run `train` with these settings, in a new directory, to its end.

    Args:
        job: the measurement.
        words: settings; later ones win.
        name: of one of several runs of this measurement.
        environment: variables of the process.
    """
    folder = new_folder(job, name)
    with job.started(command(job, folder, *words), **environment) as process:
        while process.poll() is None:
            job.wait()
    return Run(folder, job.checked(process.returncode))


def new_folder(job: Job, name: str = "") -> Path:
    """Return the path of a run directory, without one of an earlier call."""
    folder = job.folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def command(
    job: Job, folder: Path, *words: str, launcher: Sequence[str | Path] = COMMAND[:1]
) -> list[str | Path]:
    """Return the words that start `train`; `launcher` replaces Python."""
    return [
        *launcher,
        *COMMAND[1:],
        "train",
        "logger=none",
        f"trainer={job.hour.trainer}",
        f"data.root={job.hour.out / 'data'}",
        f"run_dir={folder}",
        *words,
    ]


def smoke(job: Job, *words: str, name: str = "", **environment: str) -> Run:
    """Run the smallest experiment."""
    return train(job, "experiment=smoke", "callbacks.sample=null", *words, name=name, **environment)


def speed(job: Job, *words: str, name: str = "", batch: int = 64, **environment: str) -> Run:
    """Run a recipe for its speed, on steps of `batch` samples; its checkpoints are deleted."""
    settings = [
        *SPEED,
        *tokens_of(job),
        f"max_steps={OPTIMIZER_STEPS}",
        *words,
        f"batch.global_size={batch}",
    ]
    if job.hour.dry:
        settings += TINY
    run = train(job, *settings, name=name, **environment)
    drop_checkpoints(run.folder)
    return run


def measure_speed(*words: str, **environment: str) -> Callable[[Job], None]:
    """Return a measurement of a recipe's speed on one device."""

    def measure(job: Job) -> None:
        run = speed(job, "trainer.devices=1", *words, **environment)
        job.say(run.speed(), notes=run.receipt("strategy"))

    return measure


def drop_checkpoints(folder: Path) -> None:
    """Delete a run's checkpoints, which may have many GB."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def refuse_different(first: Run, second: Run) -> None:
    """Raise a `Failure` unless two runs ended with the same bits in all weights."""
    if first.last_hash != second.last_hash:
        raise Failure(f"other bits: {first.last_hash[:12]} and {second.last_hash[:12]}")
