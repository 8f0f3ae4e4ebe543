"""The wandb run of a run directory; only rank 0 uses this module."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, WandbLogger

from lockstep_gpt.config import UserError, check_choice
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.metrics_file import STEP

if TYPE_CHECKING:
    from torch.nn import Module
    from wandb.sdk.wandb_run import Run

logger = logging.getLogger(__name__)

ENDED_WELL = ("done", "stopped early")
MODES = ("auto", "online", "offline", "disabled")


class TrackedRun(WandbLogger):
    """Lightning's `WandbLogger` with our own axes; the original always adds one."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one row under the names in metrics.csv."""
        # Never `step=`: wandb drops rows whose step is below its own count.
        self.experiment.log({STEP: step, **metrics})

    def close(self, status: str) -> None:
        """End the wandb run as `done`, `stopped early`, `stopped`, or `failed`."""
        self.experiment.summary["status"] = status
        self.experiment.finish(exit_code=0 if status in ENDED_WELL else 1)


def wandb_logger(
    *, directory: RunDirectory, config: dict[str, Any], model: Module, mode: str, **settings: Any
) -> TrackedRun:
    """Create or resume the wandb run whose id `directory` has; `config` contains no secrets."""
    check_choice("logger.wandb.mode", mode, MODES)
    import wandb

    from lockstep_gpt.run.loggers.full_run import tracked_run

    chosen = _mode(mode)
    made = tracked_run(directory, config, model, chosen, settings)
    known = inspect.signature(wandb.init).parameters
    run = _start(
        chosen,
        dir=str(directory.path.absolute()),  # wandb's process may have another working folder
        id=_run_id(directory),
        resume="allow",
        name=config["run_name"],
        config=config,
        # An unknown setting that is off comes from an extra installed at the run's start.
        **{name: value for name, value in settings.items() if value or name in known},
    )
    run.define_metric(STEP)
    for name in ("trainer/tokens", "*"):
        run.define_metric(name, step_metric=STEP)
    return made(run)


def _start(mode: Any, **arguments: Any) -> Run:
    import wandb

    quiet = wandb.Settings(console="off", silent=True, init_timeout=30)
    try:
        return wandb.init(mode=mode, settings=quiet, **arguments)
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"logger.wandb.mode={mode} is rejected by wandb: {reason}; run `wandb login`, or set "
            "logger.wandb.mode=auto, which logs offline without an account"
        ) from None
    except wandb.errors.CommError as error:
        logger.warning("wandb cannot be reached (%s); logging offline", error)
        return wandb.init(mode="offline", settings=quiet, **arguments)


def _mode(mode: str) -> Any:
    """Decide without a prompt; auto means the environment's `WANDB_MODE`, if set."""
    if mode != "auto":
        return mode
    if chosen := os.environ.get("WANDB_MODE"):
        return chosen
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except wandb.errors.AuthenticationError as error:
        logger.warning("wandb rejects the API key (%s); logging offline", error)
        return "offline"


def _run_id(directory: RunDirectory) -> str:
    """Return the id of the run in `directory`; a sweep's agent sets it, or we draw it."""
    path = directory.wandb_id
    path.parent.mkdir(exist_ok=True)  # else wandb uses the system's temporary folder
    if not path.exists():
        path.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return path.read_text()


def tracked(loggers: Iterable[Logger]) -> Iterator[TrackedRun]:
    """Yield the wandb runs among `loggers`."""
    return (each for each in loggers if isinstance(each, TrackedRun))


def offline_hint(directory: RunDirectory) -> str:
    """Return the commands to upload and to show an offline run; empty if online."""
    runs = sorted((directory.path / "wandb").glob("offline-run-*"))
    if not runs:
        return ""
    paths = " ".join(map(str, runs))
    return f"\n  wandb sync {paths}\n  wandb leet {runs[-1]}"


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision of the code at `folder`, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.check_output(
            ["git", *words], cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()

    try:
        return {"git_revision": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "-s"))}
    except (OSError, subprocess.SubprocessError):
        return {}
