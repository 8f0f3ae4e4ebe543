"""`metrics.csv`: one row per logged step, complete after every write."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.loggers.step_rows import StepRows
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.run.directory import RunDirectory
from lockstep.whole_files import replace_text


class MetricsFile(StepRows, Logger):
    """A Lightning logger with one row per step; only the last row can grow."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        super().__init__()
        self.path = path
        self.columns = [*columns]
        self.last: dict[str, str] = {}  # row
        self._end = 0  # byte where the last row begins
        self._is_open = False
        self.tracker: Logger = DummyLogger()  # the first of the run, on rank 0

    @property
    def experiment(self) -> Any:
        """The first tracker's, for code that uses `self.logger.experiment`; else a dummy."""
        return self.tracker.experiment  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        """The folder below `save_dir` where Lightning's own callbacks save files."""
        return "lightning"

    @property
    def version(self) -> str:
        """Empty: there is one file per run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory, for profilers and other parts of Lightning that write files."""
        return str(self.path.parent)

    def truncate_after(self, step: int) -> dict[str, str]:
        """Keep the rows up to optimizer step `step`; return the newest value of each column.

        It creates the file. From now on, what is logged is written, until training ends.
        """
        table = read_metrics(self.path)
        rows = [row for row in table.as_dicts() if int(row[STEP]) <= step]
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with RunDirectory(self.path.parent).writing():
            if table.damaged:
                damaged = self.path.with_name(f"{self.path.name}.damaged")
                self.path.replace(damaged)
                table.warn_if_damaged(self.path, f"; {damaged} is the file as it was")
            self._rewrite(rows)
        self._is_open = True
        return {name: value for row in rows for name, value in row.items() if value}

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write the row of `step`, or add to it if it is last, or raise a `RunError`.

        Metrics of a validation or test outside of training are left out: they belong to no step.
        """
        if not self._is_open:
            return
        step = self.row_of(step)
        assert step is not None, "every row belongs to a step"
        texts = {name: " ".join(str(value).split("\n")) for name, value in metrics.items()}
        row = {STEP: str(step), **texts}
        with RunDirectory(self.path.parent).writing():
            if self.last.get(STEP) == row[STEP]:
                row = {**self.last, **row}
            else:
                self._end = self.path.stat().st_size
            self.last = row
            new_columns = [name for name in row if name not in self.columns]
            if new_columns:
                self.columns += new_columns
                self._rewrite([*read_metrics(self.path, self._end).as_dicts(), row])
            else:
                with self.path.open("r+", encoding="utf-8", newline="") as file:
                    file.seek(self._end)
                    file.write(self._line(row))
                    file.truncate()

    @rank_zero_only
    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the frozen configuration is next to the file."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write nothing more: training has ended."""
        self._is_open = False

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        lines = [self._line({name: name for name in self.columns}), *map(self._line, rows)]
        replace_text(self.path, "".join(lines))
        self.last = {}
        self._end = self.path.stat().st_size
        if rows:
            self.last = rows[-1]
            self._end -= len(lines[-1].encode())

    def _line(self, row: dict[str, str]) -> str:
        line = io.StringIO()
        csv.DictWriter(line, self.columns, restval="", lineterminator="\n").writerow(row)
        return line.getvalue()
