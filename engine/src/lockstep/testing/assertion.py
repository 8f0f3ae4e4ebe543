"""`assert_lockstep`: trains an experiment on several numbers of ranks, and compares all results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lockstep.errors import UserError
from lockstep.settings import counted
from lockstep.testing.diagnosis import Finding, Recording, diagnose, metric_finding
from lockstep.testing.experiment import FailedRunError, joined
from lockstep.testing.programs import ProgramRuns
from lockstep.testing.results import STEP, Differences, Results, differences, first_of
from lockstep.testing.scripts import ScriptRuns, refuse_kill, script_of

# What a check sets unless the experiment's overrides do: setting -> how they may name it.
PLACE = {
    "trainer.accelerator=cpu": ("trainer", "trainer.accelerator"),
    "logger=none": ("logger",),
    "log_every=1": ("log_every",),
}


def assert_lockstep(
    main: str | Sequence[str],
    overrides: Sequence[str] = (),
    ranks: Sequence[int] = (1, 2, 4),
    tolerance: float | None = None,
    precision: str | None = None,
    kill_after: int | None = None,
    log_tolerance: float | None = None,
    steps: int | None = None,
) -> None:
    """Assert that an experiment has the same results on any number of ranks, and after a kill.

    It trains once per number of ranks, with real processes, and compares all rows of metrics.csv
    except times, and all weights and states of optimizers in the last checkpoint. Any Lightning
    script can be checked: then what it logged last is compared, and the weights and states at the
    end of `Trainer.fit`.

        assert_lockstep("train.py", steps=6)
        assert_lockstep("my_gpt", ["experiment=smoke"], steps=6, tolerance=1e-12,
                        precision="64-true")

    Args:
        main: what starts a training: the path of a script, which torchrun starts if `lockstep.main`
            decorates nothing in it; a package, run as `python -m PACKAGE train`; or the words of
            a command. `{ranks}` in a word is their number, as in `["torchrun",
            "--nproc_per_node={ranks}", "-m", "my_gpt", "train"]`, or in `["python", "train.py",
            "--devices={ranks}"]`.
        overrides: of the experiment; a script's arguments. Ranks are CPUs unless the overrides
            choose a `trainer`, or the script something else.
        ranks: numbers of ranks; the first is the reference of the others.
        tolerance: how far values may be apart, relative to the largest one of the tensor or of the
            column; None: their bits must be equal, which needs `batch.exact_micro_size` for
            several numbers of ranks.
        precision: of the experiment, such as `64-true`; None: its own. A script decides itself.
        kill_after: also train with two SIGKILLs, of a rank after this step and of the whole
            command one step later; the bits must be those of the same number of ranks. torchrun
            needs `--max-restarts=1`, and the override `resume=auto`. It needs `lockstep.main`.
        log_tolerance: how far rows of metrics.csv, and what schedulers keep of them, may be apart
            on other numbers of ranks; None: as far as weights. Lightning adds what `self.log` gets
            in float32, in the order of ranks, so its last bits depend on their number.
        steps: after how many optimizer steps each run ends; None: where the experiment says.

    Raises:
        AssertionError: a run failed, or results differ; it names the first step, the first
            tensor, and the likeliest cause.
        UserError: the arguments can't be checked.
    """
    if precision is not None and script_of(main, overrides) is not None:
        raise UserError(f"precision={precision} can't be set in {main}; let the script set it")
    words = joined(overrides, [f"precision={precision}"] if precision else [])
    check(main, words, ranks, tolerance, kill_after, _say_nothing, log_tolerance, steps)


def _say_nothing(_line: str) -> None: ...


class Tolerances(NamedTuple):
    """How far values may be apart, as `assert_lockstep` says; None: their bits must be equal."""

    weights: float | None
    logged: float | None = None

    @property
    def log(self) -> float | None:
        """Of rows of metrics.csv, and of what schedulers keep of them."""
        return self.weights if self.logged is None else self.logged


EXACTLY = Tolerances(None)


class Compared(NamedTuple):
    """A run and its results."""

    name: str  # for people
    run: str  # the name of its directory
    ranks: int
    results: Results
    killed: bool = False


def check(
    main: str | Sequence[str],
    overrides: Sequence[str],
    ranks: Sequence[int],
    tolerance: float | None,
    kill_after: int | None,
    report: Callable[[str], None],
    log_tolerance: float | None = None,
    steps: int | None = None,
) -> Results:
    """Train and compare as `assert_lockstep` says; return the first run's results.

    Args:
        main: see there.
        overrides: see there.
        ranks: see there.
        tolerance: see there.
        kill_after: see there.
        report: gets a line for each run.
        log_tolerance: see there.
        steps: see there.
    """
    refuse_nothing(ranks, kill_after)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        runs = runs_of(main, overrides, Path(folder), steps, kill_after)
        checked = Check(runs, kill_after, report)
        return checked.all(ranks, Tolerances(tolerance, log_tolerance))


class Runs(Protocol):
    """Trainings that differ only in their number of ranks."""

    def results(self, name: str, ranks: int, after: int | None) -> Results:
        """Train on so many ranks, in spite of two SIGKILLs after a step; return the results.

        Raises:
            FailedRunError: the training failed.
        """

    def recording(self, name: str, ranks: int, after: int | None) -> Recording:
        """Return what each step of a run was computed from, killed after a step or not."""

    def batch(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a run's batch."""

    def refuse_inexact(self, name: str) -> None:
        """Raise a `UserError` if a run's settings can't give equal bits on other ranks."""


def runs_of(
    main: str | Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    steps: int | None,
    kill_after: int | None,
) -> Runs:
    """Return the runs of a script, or of a program that `lockstep.main` starts."""
    if script_of(main, overrides) is not None:
        refuse_kill(main, kill_after)
        return ScriptRuns(main, overrides, folder, steps)
    words = completed(overrides, kill_after)
    return ProgramRuns(main, joined(words, [f"max_steps={steps}"] if steps else []), folder)


def refuse_nothing(ranks: Sequence[int], kill_after: int | None) -> None:
    """Raise a `UserError` if the arguments leave nothing to compare."""
    if not ranks or min(ranks) < 1:
        raise UserError(f"ranks={tuple(ranks)} must be numbers of at least 1")
    if len({*ranks}) == 1 and kill_after is None:
        raise UserError(
            f"ranks={tuple(ranks)} compares nothing; give several, as in (1, 2), or kill_after"
        )
    if kill_after is not None and kill_after < 1:
        raise UserError(f"kill_after={kill_after} must be at least 1, the first step")


def completed(overrides: Sequence[str], kill_after: int | None) -> list[str]:
    """Return the overrides of each run, with what a check needs and they don't set."""
    settings = dict(PLACE)
    if kill_after is not None:  # a save before the kill, and none right at it
        every = max(2, kill_after - 1)
        settings[f"checkpoint.every={every}"] = ("checkpoint.every",)
    chosen = {word.lstrip("+").partition("=")[0] for word in overrides}
    needed = [word for word, names in settings.items() if not chosen.intersection(names)]
    return joined(overrides, needed)


class Check:
    """Compares the runs of one experiment."""

    def __init__(self, runs: Runs, kill_after: int | None, report: Callable[[str], None]) -> None:
        self._runs = runs
        self._kill_after = kill_after
        self._report = report

    def all(self, ranks: Sequence[int], tolerance: Tolerances) -> Results:
        """Compare each run with the first, and each killed one with that of its ranks."""
        first: Compared | None = None
        for count in dict.fromkeys(ranks):
            plain = self._trained(count, first, tolerance)
            if first is None:
                first = plain
                if tolerance.weights is None and len({*ranks}) > 1:
                    self._runs.refuse_inexact(plain.run)
            else:
                self._compare(first, plain, tolerance)
            if self._kill_after is not None:
                self._compare(plain, self._killed(count), EXACTLY)
        assert first is not None
        return first.results

    def _trained(self, ranks: int, first: Compared | None, tolerance: Tolerances) -> Compared:
        """Train without a kill; if that fails and the first run didn't, say where they part."""
        name = counted(ranks, "rank")
        started = time.monotonic()
        try:
            results = self._runs.results(str(ranks), ranks, None)
        except FailedRunError as failure:
            if first is None or failure.status == 2:
                raise
            finding = self._recorded(
                first, Compared(name, str(ranks), ranks, first.results), tolerance.weights
            )
            if finding is None:
                raise
            line = str(failure).splitlines()[0]
            raise FailedRunError(f"{line}\n{finding.text()}", failure.status) from None
        return self._told(Compared(name, str(ranks), ranks, results), started)

    def _killed(self, ranks: int) -> Compared:
        assert self._kill_after is not None
        started = time.monotonic()
        name = f"{counted(ranks, 'rank')}, killed"
        results = self._runs.results(f"{ranks}-killed", ranks, self._kill_after)
        compared = Compared(name, f"{ranks}-killed", ranks, results, killed=True)
        return self._told(compared, started)

    def _told(self, compared: Compared, started: float) -> Compared:
        seconds = time.monotonic() - started
        self._report(f"  {compared.name:<18}{compared.results.digest()[:12]}{seconds:6.0f} s")
        return compared

    def _compare(self, first: Compared, other: Compared, tolerance: Tolerances) -> None:
        """Raise an `AssertionError` if the results differ."""
        found = differences(first.results, other.results, tolerance.weights, tolerance.log)
        if not found:
            return
        names = (first.name, other.name)
        where = first_of(found, names.__getitem__)
        head = f"{other.name} and {first.name} differ: {found.text()}\nfirst in: {where}"
        finding = self._explained(first, other, found, tolerance.weights)
        raise AssertionError(f"{head}\n{finding.text() if finding else NOT_AGAIN}")

    def _explained(
        self, first: Compared, other: Compared, found: Differences, tolerance: float | None
    ) -> Finding | None:
        """Return why two results differ: from the results, or from recordings of further runs."""
        if not found.weights and not found.states:
            return _of_log(found, other)
        finding = self._recorded(first, other, tolerance)
        if finding is None and found.cells and not found.weights:  # a scheduler monitors one
            return _of_log(found, other)
        return finding

    def _recorded(
        self, first: Compared, other: Compared, tolerance: float | None
    ) -> Finding | None:
        """Return where the recordings of both part."""
        ours, theirs = [
            self._runs.recording(each.run, each.ranks, self._kill_after if each.killed else None)
            for each in (first, other)
        ]
        return diagnose(ours, theirs, tolerance, other.killed, self._runs.batch(first.run))


def _of_log(found: Differences, other: Compared) -> Finding:
    """Return what it means that the log differs, and nothing that it was computed from."""
    cell = next((cell for cell in found.cells if cell.column != STEP), found.cells[0])
    finding = metric_finding(*cell, other.killed, found.log)
    others = [name for name in found.columns if name not in (STEP, cell.column)]
    if not others:
        return finding
    what = f"{finding.what}; {', '.join(others)} differ, too"
    return Finding(finding.step, what, finding.cause, finding.remedy)


NOT_AGAIN = (
    "cause: unknown; two further runs, which were recorded, did the same in every step: the result "
    "may depend on time, on threads, or on files\nremedy: train twice on the same number of ranks, "
    "and compare"
)
