"""Starts trainings of one experiment as real processes, kills them, and waits for their end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.exits import Exit
from lockstep.run.directory import RunDirectory
from lockstep.settings import counted

LIMIT = 600  # longest time for any one start of a run, in seconds
POLL = 0.05
LOG_LINES = 12  # of a failed run's output
SECONDS_TO_END = 10  # for the ranks of a command that was killed
RANKS = "{ranks}"  # in a word of the command
CALLBACKS = "+callbacks.check"  # our own nodes among those of the experiment


class FailedRunError(AssertionError):
    """A run ended with another exit status than 0; `status` is it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Experiment:
    """An experiment whose runs differ only in their number of ranks.

    Args:
        main: what starts a training: a package, run as `python -m PACKAGE train`, or the words of
            a command to which overrides are added; `{ranks}` in a word is their number.
        overrides: of each run.
        folder: for the runs; an existing one.
    """

    def __init__(self, main: str | Sequence[str], overrides: Sequence[str], folder: Path) -> None:
        self._command = command_of(main)
        self._overrides = [*overrides]
        self._folder = folder

    def train(self, name: str, ranks: int, *more: str) -> RunDirectory:
        """Train to the end on so many ranks; return the run, or raise a `FailedRunError`."""
        with self._started(name, ranks, self._words(ranks, more)) as process:
            self._finish(name, ranks, process)
        return self._directory(name)

    def train_killed(self, name: str, ranks: int, after: int, *more: str) -> RunDirectory:
        """Train in spite of two SIGKILLs: of the last rank, then of the whole command.

        The agent restarts the ranks; a second command resumes the run.

        Args:
            name: of the run.
            ranks: their number.
            after: the step after which the rank dies; the command dies one step later.
            more: further overrides.
        """
        notes = self._folder / f"{name}.kills"
        notes.mkdir()
        kills = callback("kills", f"{__package__}.kills.Kills", folder=notes, after=after)
        with self._started(name, ranks, self._words(ranks, [*kills, *more])) as process:
            note = notes / "command"
            self._wait(ranks, process, note.exists)
            if process.poll() is not None:
                self._finish(name, ranks, process)
                raise UserError(
                    f"kill_after={after} is too late: the run was done before it could be killed "
                    "twice; set a smaller one, or more steps"
                )
            process.kill()
            process.wait()
        left = processes_left(self._folder / name)
        if left:
            of_run = counted(left, "process")
            raise FailedRunError(f"{of_run} outlived the command that was killed", 1)
        with self._started(name, ranks, ["resume=auto", "trust_run_dir=true"]) as process:
            self._finish(name, ranks, process)
        return self._directory(name)

    def _words(self, ranks: int, more: Sequence[str]) -> list[str]:
        return joined(self._overrides, [f"trainer.devices={ranks}", *more])

    def _directory(self, name: str) -> RunDirectory:
        return RunDirectory(self._folder / name)

    @contextlib.contextmanager
    def _started(
        self, name: str, ranks: int, words: Sequence[str]
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a command of a run; it doesn't outlive the block."""
        words = joined(words, [f"run_dir={self._folder / name}"])
        with self._output(name).open("a", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*(word.replace(RANKS, str(ranks)) for word in self._command), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
            )
        try:
            yield process
        finally:
            process.kill()  # does nothing if it has ended
            process.wait()

    def _output(self, name: str) -> Path:
        return self._folder / f"{name}.output"

    def _wait(
        self, ranks: int, process: subprocess.Popen[str], condition: Callable[[], bool]
    ) -> None:
        """Wait until a condition is true, the process has ended, or the time is over."""
        end = time.monotonic() + LIMIT
        while not condition() and process.poll() is None:
            if time.monotonic() > end:
                of = counted(ranks, "rank")
                late = f"the run on {of} had not ended after {LIMIT} s and was stopped"
                raise FailedRunError(late, 1)
            time.sleep(POLL)

    def _finish(self, name: str, ranks: int, process: subprocess.Popen[str]) -> None:
        """Wait for the end of a command; raise a `FailedRunError` if it failed."""
        self._wait(ranks, process, lambda: False)
        if process.wait() != Exit.DONE:
            raise failure_of(f"the run on {counted(ranks, 'rank')}", self._output(name), process)


def failure_of(name: str, output: Path, process: subprocess.Popen[Any]) -> FailedRunError:
    """Return the error of a process that has ended: its last line, and what it printed before.

    Args:
        name: of the run.
        output: the file of what it printed.
        process: it.
    """
    text = output.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    error = lines[-1] if lines else "it printed nothing"
    if process.returncode == Exit.MISTAKE:  # the line says it all
        return FailedRunError(f"{name} did not begin: {error}", process.returncode)
    log = "\n".join(f"  | {line}" for line in lines[-LOG_LINES:])
    return FailedRunError(f"{name} failed: {error}\n{log}", process.returncode)


def command_of(main: str | Sequence[str]) -> list[str]:
    """Return the words to which overrides are added, or raise a `UserError`."""
    if not isinstance(main, str):
        return [*main]
    if main.endswith(".py"):
        return [sys.executable, main]
    if not all(part.isidentifier() for part in main.split(".")):
        raise UserError(
            f"main={main} is no package; name one that runs as `python -m NAME train`, a script's "
            "path that ends in .py, or the words of a command as a list"
        )
    return [sys.executable, "-m", main, "train"]


def joined(words: Sequence[str], more: Sequence[str]) -> list[str]:
    """Add overrides after the others: Hydra's parser refuses those on both sides of a flag."""
    places = [place for place, word in enumerate(words) if word[0] != "-" and "=" in word]
    end = places[-1] + 1 if places else 0
    return [*words[:end], *more, *words[end:]]


def callback(name: str, target: str, **arguments: object) -> list[str]:
    """Return the overrides that add a callback to a run."""
    node = f"{CALLBACKS}_{name}"
    values = [f"{node}.{key}={value}" for key, value in arguments.items()]
    return [f"{node}._target_={target}", *values]


def processes_left(run: Path) -> int:
    """Wait some seconds for the processes of `run` to end; return how many are left."""
    end = time.monotonic() + SECONDS_TO_END
    left = processes_of(run)
    while left and time.monotonic() < end:
        time.sleep(POLL)
        left = processes_of(run)
    return left


def processes_of(run: Path) -> int:
    """Count the live processes whose command line names `run`."""
    command = ["ps", "-ww", "-eo", "stat=,args="]  # -ww: not cut to 80 columns
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=1) for line in listing.splitlines()]
    return sum(state[0] != "Z" and str(run) in words for state, words in lines)
