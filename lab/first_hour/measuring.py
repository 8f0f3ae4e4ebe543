"""How a stage measures: each measurement has a limit, and none can end or outlast the stage."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from report import CUT_OFF, FAILED, OK, REFUSED, SKIPPED, Report, Row, last_lines

PROGRAMS = Path(__file__).resolve().parent / "programs"
ROOT = PROGRAMS.parents[2]  # the project
SHORTEST = 15.0  # seconds: with less time left, nothing starts
PATIENCE = 10  # a dry run has limits this much higher: other programs keep its CPU busy
FAREWELL = 10.0  # seconds from SIGTERM to SIGKILL, so that launchers can end their ranks
WRONG_SETTING = 2  # exit status of the project's commands for what it refuses, in one line
ABSENT_EXTRA = re.compile(r"needs the extra \w+")
# A line of a program's output that is a row: its status, unless that is `OK`; its name; its result.
ROW = re.compile(rf"row(?: ({FAILED}|{CUT_OFF}|{REFUSED}|{SKIPPED}))? \| (.*?) \| (.*)")


class Ended(Exception):  # noqa: N818 (skipping is no error)
    """A measurement ends without figures."""

    status = FAILED


class Failure(Ended):
    """Something does not work."""


class CutOff(Ended):
    """The time was over."""

    status = CUT_OFF


class Refusal(Ended):
    """The project says that it does not support this."""

    status = REFUSED


class Skip(Ended):
    """This machine or this project lacks something that the measurement needs."""

    status = SKIPPED


@dataclass(frozen=True)
class Measurement:
    """One entry in a stage's list.

    Args:
        name: what the report calls it.
        seconds: its limit.
        measure: does it, and gives its rows to the `Job`; may raise an `Ended`.
    """

    name: str
    seconds: float
    measure: Callable[[Job], None]


@dataclass(frozen=True)
class Stage:
    """A part of the hour.

    Args:
        letter: how the command line names it.
        title: the question that it answers.
        seconds: its limit.
        measurements: the most valuable first, because the last ones may be cut off.
    """

    letter: str
    title: str
    seconds: float
    measurements: Sequence[Measurement]

    def run(self, hour: Hour, only: str = "") -> None:
        """Run the measurements whose names contain `only`, until the time is over."""
        end = time.monotonic() + (hour.seconds or self.seconds)
        for measurement in self.measurements:
            if only in measurement.name:
                hour.report.drop(self.letter, measurement.name)
                seconds = measurement.seconds
                if hour.dry:
                    seconds *= PATIENCE
                deadline = min(end, time.monotonic() + seconds)
                Job(hour, self.letter, measurement, deadline).do()


@dataclass
class Hour:
    """What all measurements share."""

    out: Path
    report: Report
    dry: bool  # tiny shapes on a CPU
    devices: int  # GPUs; in a dry run, ranks
    nanogpt: Path | None = None  # a checkout of it
    seconds: float | None = None  # limit of each stage; None: its own

    @property
    def trainer(self) -> str:
        """The choice of configs/trainer."""
        return "cpu" if self.dry else "gpu"

    def environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process, which can also import our callbacks."""
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        paths = [PROGRAMS, *(Path(path).absolute() for path in given)]  # ours start elsewhere
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "XDG_STATE_HOME": str(self.out / "state"),
            "FIRST_HOUR_DRY": "1" if self.dry else "",
            "FIRST_HOUR_OUT": str(self.out),
            **changes,
        }


@dataclass
class Job:
    """One measurement under way: starts its processes, and takes its rows."""

    hour: Hour
    stage: str
    measurement: Measurement
    deadline: float  # on the monotonic clock
    _begun: float = field(default_factory=time.monotonic, init=False)
    _position: int = field(default=0, init=False)  # in the log, of the newest process's output
    _rows_taken: int = field(default=0, init=False)  # from that output

    @property
    def log(self) -> Path:
        """The output of all its processes."""
        return self.hour.out / "logs" / f"{self.stage}-{_file_name(self.measurement.name)}.txt"

    def folder(self, name: str = "") -> Path:
        """Return the path of a new run directory."""
        return self.hour.out / "runs" / _file_name(f"{self.stage} {self.measurement.name} {name}")

    @property
    def seconds_left(self) -> float:
        """The seconds to the deadline."""
        return self.deadline - time.monotonic()

    def do(self) -> None:
        """Measure; whatever happens becomes a row."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        print(f"{self.stage}  {self.measurement.name} ...", flush=True)
        if self.seconds_left < SHORTEST:
            self._add(Row(*self._names(), CUT_OFF, "before it began: the stage's time is over"))
            return
        try:
            self.measurement.measure(self)
        except Ended as ended:
            self._fail(ended.status, str(ended))
        except Exception as error:  # a wrong measurement must not end the stage
            with self.log.open("a") as log:
                log.write(traceback.format_exc())
            self._fail(FAILED, f"{type(error).__name__}: {error}")

    def say(self, result: str, name: str = "", notes: str = "", folded: str = "") -> None:
        """Add a row.

        Args:
            result: the figures.
            name: of one of several rows.
            notes: what the figures belong to.
            folded: long text.
        """
        self._add(Row(*self._names(name), OK, result, notes, folded=folded))

    def run(self, words: Sequence[str | Path], **environment: str) -> str:
        """Run a program to its end; each line of its output that is a row becomes one, at once.

        Returns:
            its output.

        Raises:
            Ended: it failed, it refused, or the time was over.
        """
        with self.started(words, **environment) as process:
            while process.poll() is None:
                self.wait()
        return self.checked(process.returncode)

    @contextlib.contextmanager
    def started(
        self, words: Sequence[str | Path], **environment: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a program, and end it with all its processes at the end of the block."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, words))}\n")
            log.flush()
            self._position = self.log.stat().st_size
            process = subprocess.Popen(
                [*map(str, words)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.hour.environment(environment),
                cwd=ROOT,
                start_new_session=True,
            )
        self._rows_taken = 0
        try:
            yield process
        finally:
            _end(process)
            self._take_rows()

    def wait(self) -> None:
        """Wait a moment, and take new rows.

        Raises:
            CutOff: the time is over.
        """
        if self.seconds_left <= 0:
            raise CutOff(f"after {time.monotonic() - self._begun:.0f} s")
        time.sleep(0.1)
        self._take_rows()

    def output(self) -> str:
        """Return what the newest process has printed so far."""
        with self.log.open("rb") as log:
            log.seek(self._position)
            return log.read().decode(errors="replace")

    def checked(self, status: int, expected: int = 0) -> str:
        """Return the output of a process that has ended, or raise what its status means."""
        output = self.output()
        if status == expected:
            return output
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        last = lines[-1][:200] if lines else "no output"
        if status == WRONG_SETTING:
            kind = Skip if ABSENT_EXTRA.search(last) else Refusal
            raise kind(last)
        raise Failure(f"exit status {status}: {last}")

    def _take_rows(self) -> None:
        """Add the rows that the newest process has printed since the last call."""
        text = self.output()
        whole = text[: text.rfind("\n") + 1].splitlines()
        found = [match for match in map(ROW.fullmatch, whole) if match]
        for match in found[self._rows_taken :]:
            status, name, result = match.groups()
            folded = last_lines(self.log) if status == FAILED else ""
            self._add(Row(*self._names(name), status or OK, result, folded=folded))
            self._rows_taken += 1

    def _fail(self, status: str, reason: str) -> None:
        folded = last_lines(self.log) if status in (FAILED, CUT_OFF) else ""
        self._add(Row(*self._names(), status, reason, folded=folded))

    def _names(self, name: str = "") -> tuple[str, str]:
        whole = self.measurement.name
        if name:
            whole = f"{whole}: {name}"
        return self.measurement.name, whole

    def _add(self, row: Row) -> None:
        now = time.monotonic()
        row.seconds = now - self._begun
        self._begun = now  # the next row's seconds are its own
        self.hour.report.add(self.stage, row)
        print(f"   {row.in_table()}", flush=True)


def program(name: str) -> list[str | Path]:
    """Return the command of one of our programs."""
    return [sys.executable, PROGRAMS / f"{name}.py"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, first politely."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(FAREWELL)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _file_name(text: str) -> str:
    return re.sub(r"\W+", "-", text).strip("-")
