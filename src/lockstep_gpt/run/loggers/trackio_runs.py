"""`logger=trackio`: one run in trackio, Hugging Face's tracker, which needs no account."""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
from typing import Any

from lightning.pytorch.loggers import Logger

from lockstep_gpt.errors import UserError
from lockstep_gpt.optional import import_optional
from lockstep_gpt.processes import tool
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracking import ENDED_WELL, TrackedRun, known_id
from lockstep_gpt.whole_files import replace_text

logger = logging.getLogger(__name__)

RUN_NAME = r"[^\x00-\x1f\x7f]+"  # one line


class TrackioRun(Logger, TrackedRun):
    """Resumes the trackio run whose name is in the run directory, or starts one.

    Args:
        directory: the run.
        config: its configuration; the trackio run has the same name if no other run has it.
        project: the project of trackio that the run is filed under.
        group: shows runs together.
        arguments: others of `trackio.init`, such as `space_id`.

    Raises:
        UserError: trackio isn't installed, or it rejects a setting.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        config: dict[str, Any],
        project: str,
        group: str | None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.trackio = import_optional("logger=trackio", "trackio", "trackio")
        name_file = directory.path / "trackio_run"
        name = known_id(name_file, RUN_NAME)
        resume = "allow"
        try:
            if name is None:
                name = self._unused_name(project, config["run_name"])
                resume = "never"
                replace_text(name_file, name)
            self.project = project
            with self._quiet():
                self.experiment = self.trackio.init(
                    project=project,
                    name=name,
                    group=group,
                    config=config,
                    resume=resume,
                    **arguments,
                )
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"logger.trackio.project={project} is rejected by trackio: {reason}"
            ) from None
        self.last_step = 0

    @property
    def name(self) -> str:
        """The project."""
        return self.project

    @property
    def version(self) -> str:
        """The name of the trackio run."""
        return str(self.experiment.name)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: trackio got the configuration at its start."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log one row under the names in metrics.csv."""
        self.experiment.log(dict(metrics), step=step)
        if step is not None:
            self.last_step = step

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], *, step: int) -> None:
        """Log a table; trackio shows one per step."""
        table = self.trackio.Table(columns=columns, data=data)
        self.experiment.log({key: table}, step=step)

    def log_html(self, key: str, html: str, step: int) -> None:
        """Log a page, without trackio's styles."""
        page = self.trackio.Html(html, inject=False, data_is_not_path=True)
        self.experiment.log({key: page}, step=step)

    def close(self, status: str) -> None:
        """Log the status, with an alert if the run ended early, then write what is left."""
        run = self.experiment
        run.log({"status": status}, step=self.last_step)
        with self._quiet():
            if status not in ENDED_WELL:
                level = self.trackio.AlertLevel.ERROR
                text = f"the run {run.name} ended early: {status}"
                run.alert(f"{run.name} {status}", text, level=level, step=self.last_step)
            self.trackio.finish()

    def next_commands(self) -> list[str]:
        """Return the command that shows the project in a browser."""
        return [f'{tool("trackio")} show --project "{self.project}"']

    def _unused_name(self, project: str, name: str) -> str:
        """Return `name`, with an ending if the project has such a run: trackio resumes by name."""
        try:
            taken = {run.name for run in self.trackio.Api().runs(project)}
        except ValueError:  # no such project yet
            return name
        if name not in taken:
            return name
        return f"{name}-{secrets.token_hex(2)}"

    @staticmethod
    @contextlib.contextmanager
    def _quiet() -> Any:
        """Send to the log what trackio prints: the screen is the run's own."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            yield
        logger.debug("%s", printed.getvalue().rstrip())
