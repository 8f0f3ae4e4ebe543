"""Writes the environment of a run when it starts, and a report when it ends."""

from __future__ import annotations

import logging
import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from lockstep_gpt.config import Config
from lockstep_gpt.extras.pages.page_settings import PageSettings
from lockstep_gpt.extras.pages.recordings import as_json
from lockstep_gpt.extras.pages.run_report import report_page
from lockstep_gpt.run.callbacks.stopping import Stopped
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracking import git_state
from lockstep_gpt.run.metrics_file import MetricsFile
from lockstep_gpt.training.ending import status_of, summary_of_callbacks
from lockstep_gpt.whole_files import replace_text, write_output

logger = logging.getLogger(__name__)

LIBRARIES = ("lightning", "hydra-core", "numpy")


class ReportAtEnd(Callback):
    """Writes `environment.json` and `report.html` to the run directory, on rank 0 only."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Find the run directory and write the environment to it."""
        metrics = next(logger for logger in trainer.loggers if isinstance(logger, MetricsFile))
        self._run = metrics.path.parent
        if trainer.is_global_zero:
            content = as_json(environment(pl_module.device))
            replace_text(self._run / "environment.json", content)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the report when training ends."""
        self._write(trainer, status_of(trainer))

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the report when the run is stopped or fails."""
        status = str(exception) if isinstance(exception, Stopped) else f"failed: {exception}"
        self._write(trainer, status.splitlines()[0])

    def _write(self, trainer: Trainer, status: str) -> None:
        if trainer.is_global_zero and hasattr(self, "_run"):
            path = self._run / "report.html"
            try:
                # summary.json, which later reports read, isn't written yet.
                summary = summary_of_callbacks(trainer)
                write_output(path, report_page([self._run], status=status, summary=summary))
            except Exception as error:  # a report must never change how a run ends
                logger.warning("no report: %s: %s", type(error).__name__, error)
            else:
                logger.info("\nreport  %s", path)


def environment(device: torch.device) -> dict[str, Any]:
    """Return this rank's host, device, library versions, and git state."""
    name = platform.machine()
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    libraries = {library: version(library) for library in LIBRARIES}
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "device": name,
        "processors": os.cpu_count(),
        "threads of rank 0": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, as in 2.13.0+cpu
        **libraries,
        **git_state(Path(__file__).parent),
    }


def callbacks(
    config: Config, _directory: RunDirectory, _rank: int, _terminal: Any
) -> list[Callback]:
    """Return the callback that writes the report, unless the run wants none."""
    return [ReportAtEnd()] if PageSettings.of(config).report else []
