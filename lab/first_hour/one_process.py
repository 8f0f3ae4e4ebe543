"""Stage A: the parts of a step in one process, the most valuable first.

A process of its own for each would wait for imports, the GPU, and the compiler; so these figures
take a fifth of the time. They are for when a GPU is there for a quarter of an hour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from measuring import PATIENCE, Hour, Job, Measurement
from report import Row

FAREWELL = 5.0  # seconds in which the process can end by itself


@dataclass(frozen=True)
class Part:
    """What the process measures in one go: its name in `programs/parts`, and its limit."""

    name: str
    seconds: float


@dataclass(frozen=True)
class OneProcess:
    """A stage whose measurements share a process; see `Stage`.

    Args:
        letter: how the command line names it.
        title: the question that it answers.
        seconds: its limit.
        measurements: the most valuable first, because the last ones may be cut off.
    """

    letter: str
    title: str
    seconds: float
    measurements: Sequence[Part]

    def run(self, hour: Hour, only: str = "") -> None:
        """Measure the parts whose names contain `only`, until the time is over."""
        parts = [part for part in self.measurements if only in part.name]
        if not parts:
            return
        patience = PATIENCE if hour.dry else 1
        words = [f"{part.name}={part.seconds * patience}" for part in parts]

        def measure(job: Job) -> None:
            seconds = job.seconds_left - FAREWELL
            job.run([sys.executable, "-m", "parts", "--seconds", f"{seconds:.0f}", *words])

        seconds = hour.seconds or self.seconds
        process = Measurement("the process", seconds, measure)
        for name in (process.name, *(part.name for part in parts)):
            hour.report.drop(self.letter, name)
        JobOfParts(hour, self.letter, process, time.monotonic() + seconds).do()


class JobOfParts(Job):
    """A job whose rows say which measurement they belong to, as in `PART: ROW`."""

    def _add(self, row: Row) -> None:
        prefix = f"{self.measurement.name}: "
        if row.name.startswith(prefix):
            row.name = row.name.removeprefix(prefix)
            row.measurement = row.name.partition(": ")[0]
        super()._add(row)


STAGE = OneProcess(
    "A",
    "Where does a step go, and what makes it faster?",
    480,
    [
        Part("facts", 30),
        Part("collectives", 45),
        Part("products", 30),
        Part("attention", 30),
        Part("base", 100),
        Part("float32 residual", 80),
        Part("loss", 60),
        Part("ddp", 110),
        Part("coordinate descent", 100),
        Part("optimizers", 45),
    ],
)
