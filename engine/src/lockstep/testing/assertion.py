"""`assert_lockstep`: trains an experiment on several numbers of ranks, and compares all results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.settings import counted
from lockstep.testing.diagnosis import (
    Finding,
    Recording,
    diagnose,
    metric_finding,
    read_recording,
)
from lockstep.testing.experiment import Experiment, FailedRunError, callback, joined
from lockstep.testing.results import (
    STEP,
    Differences,
    Results,
    differences,
    first_of,
    results_of,
)

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
) -> None:
    """Assert that an experiment has the same results on any number of ranks, and after a kill.

    It trains once per number of ranks, with real processes, and compares all rows of metrics.csv
    except times, and all weights and states of optimizers in the last checkpoint.

        assert_lockstep("my_gpt", ["experiment=smoke", "max_steps=6"], tolerance=1e-12,
                        precision="64-true")

    Args:
        main: what starts a training: a package, run as `python -m PACKAGE train`, or the words of
            a command to which overrides are added. `{ranks}` in a word is their number, as in
            `["torchrun", "--nproc_per_node={ranks}", "-m", "my_gpt", "train"]`.
        overrides: of the experiment; they also decide how long it trains. Ranks are CPUs unless
            they choose a `trainer`.
        ranks: numbers of ranks; the first is the reference of the others.
        tolerance: how far values may be apart, relative to the largest one of the tensor or of the
            column; None: their bits must be equal, which needs `batch.exact_micro_size` for
            several numbers of ranks.
        precision: of the experiment, such as `64-true`; None: its own.
        kill_after: also train with two SIGKILLs, of a rank after this step and of the whole
            command one step later; the bits must be those of the same number of ranks. torchrun
            needs `--max-restarts=1`, and the override `resume=auto`.
        log_tolerance: how far rows of metrics.csv, and what schedulers keep of them, may be apart
            on other numbers of ranks; None: as far as weights. Lightning adds what `self.log` gets
            in float32, in the order of ranks, so its last bits depend on their number.

    Raises:
        AssertionError: a run failed, or results differ; it names the first step, the first
            tensor, and the likeliest cause.
        UserError: the arguments can't be checked.
    """
    words = joined(overrides, [f"precision={precision}"] if precision else [])
    check(main, words, ranks, tolerance, kill_after, _say_nothing, log_tolerance)


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
    """
    refuse_nothing(ranks, kill_after)
    words = completed(overrides, kill_after)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        checked = Check(Experiment(main, words, Path(folder)), Path(folder), kill_after, report)
        return checked.all(ranks, Tolerances(tolerance, log_tolerance))


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
    """The runs of one check, in a folder of their own."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        kill_after: int | None,
        report: Callable[[str], None],
    ) -> None:
        self._experiment = experiment
        self._folder = folder
        self._kill_after = kill_after
        self._report = report

    def all(self, ranks: Sequence[int], tolerance: Tolerances) -> Results:
        """Compare each run with the first, and each killed one with that of its ranks."""
        first: Compared | None = None
        for count in dict.fromkeys(ranks):
            plain = self._trained(count, first, tolerance)
            if first is None:
                first = plain
                refuse_inexact(self._directory(plain.run), ranks, tolerance.weights)
            else:
                self._compare(first, plain, tolerance)
            if self._kill_after is not None:
                self._compare(plain, self._killed(count), EXACTLY)
        assert first is not None
        return first.results

    def _directory(self, run: str) -> RunDirectory:
        return RunDirectory(self._folder / run)

    def _trained(self, ranks: int, first: Compared | None, tolerance: Tolerances) -> Compared:
        """Train without a kill; if that fails and the first run didn't, say where they part."""
        name = counted(ranks, "rank")
        started = time.monotonic()
        try:
            directory = self._experiment.train(str(ranks), ranks)
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
        return self._told(Compared(name, str(ranks), ranks, results_of(directory)), started)

    def _killed(self, ranks: int) -> Compared:
        assert self._kill_after is not None
        started = time.monotonic()
        name = f"{counted(ranks, 'rank')}, killed"
        directory = self._experiment.train_killed(f"{ranks}-killed", ranks, self._kill_after)
        compared = Compared(name, f"{ranks}-killed", ranks, results_of(directory), killed=True)
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
        """Train both once more with recordings, and return where these part."""
        recordings: list[Recording] = []
        for compared in (first, other):
            name = f"{compared.run}-recorded"
            folder = self._folder / f"{name}.steps"
            folder.mkdir(exist_ok=True)
            words = callback("record", f"{__package__}.recording.Record", folder=folder)
            try:
                if compared.killed and self._kill_after is not None:
                    self._experiment.train_killed(name, compared.ranks, self._kill_after, *words)
                else:
                    self._experiment.train(name, compared.ranks, *words)
            except FailedRunError:
                pass  # what it has recorded may show why
            recordings.append(read_recording(folder))
        batch = self._directory(first.run).values().get("batch")
        return diagnose(recordings[0], recordings[1], tolerance, other.killed, batch)


def _of_log(found: Differences, other: Compared) -> Finding:
    """Return what it means that the log differs, and nothing that it was computed from."""
    cell = next((cell for cell in found.cells if cell.column != STEP), found.cells[0])
    return metric_finding(*cell, other.killed)


NOT_AGAIN = (
    "cause: unknown; two further runs, which were recorded, did the same in every step: the result "
    "may depend on time, on threads, or on files\nremedy: train twice on the same number of ranks, "
    "and compare"
)


def refuse_inexact(run: RunDirectory, ranks: Sequence[int], tolerance: float | None) -> None:
    """Raise a `UserError` if bits should be equal and gradients are added in another order."""
    exact = run.values().get("batch", {}).get("exact_micro_size")
    if tolerance is None and exact is None and len({*ranks}) > 1:
        raise UserError(
            "tolerance=None needs equal bits, and batch.exact_micro_size=null gives them only on "
            "one number of ranks; set batch.exact_micro_size, or a tolerance, such as 1e-12 with "
            "precision=64-true"
        )
