"""Runs of a program that `lockstep.main` starts, on several numbers of ranks, also killed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.testing.diagnosis import Recording, read_recording
from lockstep.testing.experiment import Experiment, FailedRunError, callback
from lockstep.testing.results import Results, results_of


class ProgramRuns:
    """Trainings of a program that differ only in their number of ranks.

    Args:
        main: what starts one, as `assert_lockstep` says.
        overrides: of each run.
        folder: for the runs; an existing one.
    """

    def __init__(self, main: str | Sequence[str], overrides: Sequence[str], folder: Path) -> None:
        self._experiment = Experiment(main, overrides, folder)
        self._folder = folder

    def results(self, name: str, ranks: int, after: int | None) -> Results:
        """Train on so many ranks, in spite of two SIGKILLs after a step; return the results."""
        if after is not None:
            return results_of(self._experiment.train_killed(name, ranks, after))
        return results_of(self._experiment.train(name, ranks))

    def recording(self, name: str, ranks: int, after: int | None) -> Recording:
        """Train once more, and return what each step was computed from.

        Args:
            name: of the run to repeat.
            ranks: their number.
            after: the step after which it was killed; None: it wasn't.
        """
        folder = self._folder / f"{name}.steps"
        folder.mkdir(exist_ok=True)
        words = callback("record", f"{__package__}.recording.Record", folder=folder)
        try:
            if after is not None:
                self._experiment.train_killed(f"{name}-recorded", ranks, after, *words)
            else:
                self._experiment.train(f"{name}-recorded", ranks, *words)
        except FailedRunError:
            pass  # what it has recorded may show why
        return read_recording(folder)

    def batch(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a run's batch."""
        batch: Mapping[str, Any] = RunDirectory(self._folder / name).values().get("batch", {})
        return batch

    def refuse_inexact(self, name: str) -> None:
        """Raise a `UserError` if a run adds gradients in another order on other ranks."""
        if self.batch(name).get("exact_micro_size") is None:
            raise UserError(
                "tolerance=None needs equal bits, and batch.exact_micro_size=null gives them only "
                "on one number of ranks; set batch.exact_micro_size, or a tolerance, such as 1e-12 "
                "with precision=64-true"
            )
