"""What wandb gets in addition to metrics and configuration, if `logger.wandb` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from lockstep_gpt.config import UserError, check_choice
from lockstep_gpt.run.checkpoint import files_of
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers import tracking
from lockstep_gpt.run.metrics_file import STEP

if TYPE_CHECKING:
    from torch.nn import Module
    from wandb.sdk.wandb_run import Run

# What wandb shows for a metric in its table of runs, instead of the last value.
SUMMARIES = {
    **dict.fromkeys(("train/loss", "val/loss", "val/perplexity"), "min"),
    **dict.fromkeys(("throughput/tokens_per_second", "optim/grad_norm"), "max"),
}
WATCHED = (None, "gradients", "parameters", "all")


def tracked_run(
    directory: RunDirectory,
    config: dict[str, Any],
    model: Module,
    mode: str,
    settings: dict[str, Any],
) -> Callable[[Run], FullRun]:
    """Return a function that makes a logger of a wandb run.

    Args:
        directory: the run directory.
        config: the run's configuration.
        model: for the histograms of `watch`, every `log_every` steps.
        mode: online, offline, or disabled.
        settings: of `logger.wandb`; this removes ours.

    Raises:
        UserError: `watch` is unknown, or `log_model` is set and the run isn't online.
    """
    watch, log_code = settings.pop("watch", None), settings.pop("log_code", False)
    log_model = settings.pop("log_model", False)
    check_choice("logger.wandb.watch", watch, WATCHED)
    if log_model and mode != "online":
        raise UserError(
            f"logger.wandb.log_model=true uploads to wandb, but this run is {mode}; log in "
            "with `wandb login`, or keep copies with checkpoint.copy_to"
        )

    def made(experiment: Run) -> FullRun:
        for name, summary in SUMMARIES.items():
            experiment.define_metric(name, step_metric=STEP, summary=summary)
        if log_code:
            experiment.log_code(str(Path(tracking.__file__).parents[1]))
        if watch:
            experiment.watch(model, log=watch, log_freq=config["log_every"], log_graph=False)
        return FullRun(experiment, directory if log_model else None)

    return made


class FullRun(tracking.TrackedRun):
    """A wandb run with tables that grow, alerts, and checkpoints as artifacts.

    Args:
        experiment: the wandb run.
        directory: the run whose best and last checkpoint are logged at the end; None: neither.
    """

    def __init__(self, experiment: Run, directory: RunDirectory | None) -> None:
        super().__init__(experiment=experiment)
        self.directory = directory
        self._tables: dict[str, wandb.Table] = {}

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,  # noqa: ARG002
        step: int | None = None,
    ) -> None:
        """Add rows to the table `key`, which grows during the run."""
        if key not in self._tables:
            self._tables[key] = wandb.Table(columns=[*(columns or ())], log_mode="INCREMENTAL")
        for row in data or ():
            self._tables[key].add_data(*row)
        self.log_metrics({key: self._tables[key]}, step)

    def close(self, status: str) -> None:
        """Log the checkpoints, send an alert if the run ended early, then end it."""
        summary = self.directory.read_summary() if self.directory else {}
        aliases: dict[str, list[str]] = {}
        for name, alias in (("best_checkpoint", "best"), ("last_checkpoint", "latest")):
            if path := summary.get(name):
                aliases.setdefault(path, [Path(path).stem]).append(alias)
        for path, names in aliases.items():
            artifact = wandb.Artifact(f"{self.experiment.id}-checkpoint", type="model")
            for each in files_of(Path(path)):
                artifact.add_file(str(each))
            self.experiment.log_artifact(artifact, aliases=names)
        if status not in tracking.ENDED_WELL:
            name = self.experiment.name
            self.experiment.alert(f"{name} {status}", f"the run {name} ended early: {status}")
        if status == "stopped":
            self.experiment.mark_preempting()
        super().close(status)
