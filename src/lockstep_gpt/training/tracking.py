"""All we know of wandb, and the loggers beside `metrics.csv`; only rank 0 ever comes here."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lockstep_gpt.config import UserError, as_typed
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training.checkpoint import files_of
from lockstep_gpt.training.metrics_file import STEP

if TYPE_CHECKING:
    from torch.nn import Module
    from wandb.sdk.wandb_run import Run

logger = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")
WATCHED = (None, "gradients", "parameters", "all")
TOKENS = "trainer/tokens"
# What wandb shows of a metric in its table of runs, instead of the last value.
SUMMARIES = {
    "train/loss": "min",
    "val/loss": "min",
    "val/perplexity": "min",
    "throughput/tokens_per_second": "max",
    "optim/grad_norm": "max",
}


class TrackedRun(WandbLogger):
    """Lightning's `WandbLogger` on axes of our own; it always adds one of Lightning's.

    Args:
        experiment: the run.
        keep_checkpoints: log checkpoints as an artifact at the end.
        watched: what to draw histograms of: None, gradients, parameters or all.
    """

    def __init__(
        self, experiment: Run, keep_checkpoints: bool = False, watched: str | None = None
    ) -> None:
        super().__init__(experiment=experiment)
        self.keep_checkpoints, self.watched = keep_checkpoints, watched
        self._samples: Any = None  # the table, once there is a sample

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one row under the names that metrics.csv has."""
        # Never `step=`: wandb drops rows whose step is not beyond the last one's.
        self.experiment.log({STEP: step, **metrics})

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the configuration was given when the run was made."""

    def begin(self, model: Module, every: int) -> None:
        """Draw histograms of `model` at each `every` steps, if it was asked for."""
        if self.watched:
            self.watch(model, log=self.watched, log_freq=every, log_graph=False)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Add a row to the table of samples, which grows in the course of the run."""
        import wandb

        if self._samples is None:
            names: list[str | int] = ["step", "prompt", "text"]
            self._samples = wandb.Table(columns=names, log_mode="INCREMENTAL")
        self._samples.add_data(step, prompt, text)
        self.experiment.log({STEP: step, "samples": self._samples})

    def close(self, status: str, checkpoints: dict[Path, list[str]]) -> None:
        """End the wandb run as `done`, `stopped` or `failed`.

        Args:
            status: which of them.
            checkpoints: files -> their aliases.
        """
        if self.keep_checkpoints:
            for path, aliases in checkpoints.items():
                self._log_checkpoint(path, aliases)
        if status != "done":
            name = self.experiment.name
            self.experiment.alert(f"{name} {status}", f"the run {name} ended early: {status}")
        if status == "stopped":
            self.experiment.mark_preempting()
        self.experiment.finish(exit_code=0 if status == "done" else 1)

    def _log_checkpoint(self, path: Path, aliases: list[str]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self.experiment.id}-checkpoint", type="model")
        for each in files_of(path):
            artifact.add_file(str(each))
        self.experiment.log_artifact(artifact, aliases=aliases)


def wandb_logger(
    *,
    directory: RunDirectory,
    config: dict[str, Any],
    mode: str,
    log_model: bool = False,
    log_code: bool = False,
    watch: str | None = None,
    **arguments: Any,
) -> TrackedRun:
    """Make or go on with the one wandb run of `directory`.

    Args:
        directory: holds wandb's files and the run's id, by which a resumed run is the same one.
        config: what wandb shows as the configuration; no secrets.
        mode: online, offline, disabled, or auto: online if there is an account.
        log_model: log the best and the last checkpoint at the end.
        log_code: log the source of this package.
        watch: histograms of gradients, parameters, all, or none.
        arguments: passed on to `wandb.init`: project, entity, group, tags, job_type, notes.

    Raises:
        UserError: `mode` or `watch` is unknown, or checkpoints have nowhere to go.
    """
    if mode not in MODES:
        raise UserError(f"logger.wandb.mode={mode} is not one of {', '.join(MODES)}")
    if watch not in WATCHED:
        names = ", ".join(map(as_typed, WATCHED))
        raise UserError(f"logger.wandb.watch={watch} is not one of {names}")
    chosen = _mode(mode)
    if log_model and chosen != "online":
        raise UserError(
            f"logger.wandb.log_model=true goes to wandb's server, and this run is {chosen}; log in "
            "with `wandb login`, or keep copies with checkpoint.copy_to"
        )
    run = _start(
        chosen,
        dir=str(directory.path),
        id=_run_id(directory),
        resume="allow",
        name=config["run_name"],
        config=config,
        **arguments,
    )
    run.define_metric(STEP)
    run.define_metric(TOKENS, step_metric=STEP)
    run.define_metric("*", step_metric=STEP)
    for name, summary in SUMMARIES.items():
        run.define_metric(name, step_metric=STEP, summary=summary)
    if log_code:
        run.log_code(str(Path(__file__).parents[1]))
    return TrackedRun(run, log_model, watch)


def _start(mode: Any, **arguments: Any) -> Run:
    import wandb

    Path(arguments["dir"], "wandb").mkdir(exist_ok=True)  # else wandb takes the system's own
    quiet = wandb.Settings(console="off", silent=True, init_timeout=30)
    try:
        return wandb.init(mode=mode, settings=quiet, **arguments)
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"logger.wandb.mode={mode} is refused by wandb: {reason}; run `wandb login`, or set "
            "logger.wandb.mode=auto, which logs offline without an account"
        ) from None
    except wandb.errors.CommError as error:
        logger.warning("wandb cannot be reached (%s); logging offline", error)
        return wandb.init(mode="offline", settings=quiet, **arguments)


def _mode(mode: str) -> Any:
    """Decide without asking anybody; the environment's `WANDB_MODE` is what auto means."""
    if mode != "auto":
        return mode
    if chosen := os.environ.get("WANDB_MODE"):
        return chosen
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except wandb.errors.AuthenticationError as error:
        logger.warning("wandb refuses the key at hand (%s); logging offline", error)
        return "offline"


def run_id_file(directory: RunDirectory) -> Path:
    """Return where the id of the wandb run is kept."""
    return directory.path / "wandb" / "run_id"


def _run_id(directory: RunDirectory) -> str:
    """Return the id of the run in `directory`; a sweep's agent gives one, or we draw it."""
    path = run_id_file(directory)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return path.read_text()


def read_run_id(directory: RunDirectory) -> str | None:
    """Return the id of the wandb run, if there is one."""
    path = run_id_file(directory)
    return path.read_text() if path.exists() else None


def tensorboard_logger(*, directory: RunDirectory) -> TensorBoardLogger:
    """Write TensorBoard's files below the run directory."""
    return TensorBoardLogger(directory.path, name="tensorboard", version="")


def tracked(loggers: Iterable[Logger]) -> Iterator[TrackedRun]:
    """Yield what of `loggers` is a wandb run."""
    return (each for each in loggers if isinstance(each, TrackedRun))


def offline_hint(directory: RunDirectory) -> str:
    """Return the lines that say how to look at and upload an offline run; empty if online."""
    runs = sorted((directory.path / "wandb").glob("offline-run-*"))
    if not runs:
        return ""
    paths = " ".join(map(str, runs))
    return f"\n  wandb sync {paths}\n  wandb leet {runs[-1]}"


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision of the code at `folder`, and whether files differ from it."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return {}
    return {"git_revision": revision, "git_dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
