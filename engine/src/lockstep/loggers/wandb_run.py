"""`logger=wandb`: one wandb run per run directory, even after a resume."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import os
import secrets
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.loggers import WandbLogger

from lockstep.checkpoints.sums import files_of
from lockstep.errors import UserError
from lockstep.file_systems import is_unsupported
from lockstep.loggers.step_rows import StepRows
from lockstep.loggers.tracker_guard import TrackerGuard
from lockstep.loggers.tracking import ENDED_WELL, WANDB_ID, TrackedRun, known_id
from lockstep.metrics.rows import STEP
from lockstep.patches.wandb import guard_rows, kill_service, quick_start
from lockstep.processes import tool
from lockstep.project import program
from lockstep.run.directory import RunDirectory
from lockstep.settings import check, check_choice
from lockstep.whole_files import replace_text

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

logger = logging.getLogger(__name__)

RUN_ID = "WANDB_RUN_ID"  # of the run that a sweep's agent starts
SWEEP_ID = "WANDB_SWEEP_ID"  # of an agent's sweep; with it, wandb takes no ID but the variable's
MODES = ("auto", "online", "offline", "disabled")
INIT_SECONDS = 30.0  # for the server's answer at the start
# What wandb shows for a metric in its table of runs, instead of the last value.
SUMMARIES = {
    "train/loss": "min",
    "val/loss": "min",
    "val/perplexity": "min",
    "throughput/tokens_per_second": "max",
    "optim/grad_norm": "max",
}


def sweep_of(directory: RunDirectory) -> str | None:
    """Return the name of the sweep that a run belongs to; None if there is none."""
    is_job = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return directory.path.absolute().parent.name if is_job else None


class WandbRun(StepRows, WandbLogger, TrackedRun):
    """Lightning's `WandbLogger` with our axes, tables that grow, alerts, and checkpoints.

    Args:
        directory: the run, which has the id of the wandb run.
        config: its configuration, without secrets; the wandb run has the same name.
        mode: auto, online, offline, or disabled.
        log_model: upload the best and the last checkpoint at the end, as an artifact.
        guard: also of rows that don't come through this logger; None: none.
        arguments: of `wandb.init`, such as `project`; `group` is by default that of a sweep. For
            what is left out, wandb's variables hold, such as WANDB_TAGS, or the project is the
            program. The project and the entity of the first start stay.

    Raises:
        UserError: a setting is unknown, wandb rejects the account, or `log_model` is set and the
            run isn't online.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        config: dict[str, Any],
        mode: str,
        log_model: bool = False,
        guard: TrackerGuard | None = None,
        **arguments: Any,
    ) -> None:
        check_choice("logger.wandb.mode", mode, MODES)
        tags = arguments.get("tags")  # wandb would take each letter of a text for one
        check(
            "logger.wandb.tags", tags, not isinstance(tags, str), f"must be a list; write [{tags}]"
        )
        _refuse_unknown(arguments)
        group = arguments.get("group") or os.environ.get("WANDB_RUN_GROUP")
        arguments["group"] = group or sweep_of(directory)
        arguments["tags"] = tags or None  # wandb then reads its variable
        kind = arguments.get("job_type") or os.environ.get("WANDB_JOB_TYPE")
        arguments["job_type"] = kind or "train"
        arguments |= owner_of(directory, arguments)
        run_id = id_of(directory)
        leave_other_sweep(run_id)  # before wandb reads its variables
        mode = decide_mode(mode)
        if log_model and mode != "online":
            raise UserError(
                f"logger.wandb.log_model=true uploads to wandb, but this run is {mode}; log in "
                "with `wandb login`, or keep copies with checkpoint.copy_to"
            )
        seconds = INIT_SECONDS
        if guard is not None:
            seconds = min(seconds, 0.75 * guard.seconds)  # the rest is for a start offline
        run = start_run(
            mode,
            seconds,
            dir=str(directory.path.absolute()),  # wandb's process may have another working folder
            id=run_id,
            resume="allow",
            name=name_of(directory, config["run_name"]),
            config=config,
            **arguments,
        )
        if guard is not None:
            guard_rows(run, guard.call)
        define_axes(run)
        super().__init__(experiment=run)
        self.directory = directory
        self.uploads_checkpoints = log_model
        self.tables: dict[str, wandb.Table] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one row under the names in metrics.csv."""
        refuse_full_disk(self.directory.wandb_id.parent)
        # Never `step=`: wandb drops rows whose step is below its own count.
        self.experiment.log({STEP: self.row_of(step), **metrics})

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Add rows to the table `key`, which grows during the run."""
        if key not in self.tables:
            self.tables[key] = wandb.Table(columns=[*(columns or ())], log_mode="INCREMENTAL")
        for row in data or ():
            self.tables[key].add_data(*row)
        self.log_metrics({key: self.tables[key]}, step)

    def log_html(self, key: str, html: str, step: int) -> None:
        """Log a page, without wandb's styles."""
        self.log_metrics({key: wandb.Html(html, inject=False)}, step)

    def close(self, status: str) -> None:
        """Log the checkpoints, send an alert if the run ended early, then end it."""
        run = self.experiment
        refuse_full_disk(self.directory.wandb_id.parent)
        if self.uploads_checkpoints:
            log_checkpoints(run, self.directory)
        if status not in ENDED_WELL:
            run.alert(f"{run.name} {status}", f"the run {run.name} ended early: {status}")
        if status == "stopped":
            run.mark_preempting()
        run.summary["status"] = status
        run.finish(exit_code=0 if status in ENDED_WELL else 1)

    @staticmethod
    def abandon(directory: RunDirectory) -> str:
        """End wandb's process, and return the command that uploads what this run's has written."""
        kill_service()
        with contextlib.suppress(BaseException):  # its exit handler shows a stack otherwise
            wandb.teardown()
        folders = sorted((directory.path / "wandb").glob("*run-*"))
        if not folders:
            return ""
        return f"to upload what wandb has: {tool('wandb')} sync {folders[-1]}"

    def next_commands(self) -> list[str]:
        """Return the commands to upload and to show an offline run; none if online."""
        folders = sorted((self.directory.path / "wandb").glob("offline-run-*"))
        if not folders:
            return []
        paths = [shlex.quote(str(folder)) for folder in folders]
        wandb = tool("wandb")
        return [f"{wandb} sync {' '.join(paths)}", f"{wandb} leet {paths[-1]}"]


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raise a `UserError` for arguments that `wandb.init` hasn't: else it would only not record."""
    known = inspect.signature(wandb.init).parameters
    for name, value in arguments.items():
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        rule = f"is no argument of wandb.init; {hint}"
        check(f"logger.wandb.{name}", value, name in known, rule)


def decide_mode(mode: str) -> Any:
    """Return online, offline, or disabled, without a prompt; `WANDB_MODE` decides for auto."""
    if mode != "auto":
        return mode
    chosen = os.environ.get("WANDB_MODE")
    if chosen:
        return chosen
    wandb.setup(wandb.Settings(silent=True))
    try:
        logged_in = wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        logger.warning("wandb rejects the API key (%s); logging offline", error)
        return "offline"
    return "online" if logged_in else "offline"


def start_run(mode: Any, seconds: float, **arguments: Any) -> Run:
    """Start or resume a wandb run; one that can't reach the server in `seconds` logs offline."""
    quiet = wandb.Settings(console="off", silent=True, init_timeout=seconds, **quick_start())
    try:
        return wandb.init(mode=mode, settings=quiet, **arguments)
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        reason = " ".join(str(error).split())
        if RUN_ID in os.environ and "Run ID" in reason:
            raise UserError(
                f"{RUN_ID}={os.environ[RUN_ID]} is rejected by wandb: {reason}; unset it"
            ) from None
        rule = f"is rejected by wandb: {reason}; name another"
        is_project = "Invalid project name" in reason
        check("logger.wandb.project", arguments.get("project"), not is_project, rule)
        place = "logger.wandb.mode"
        remedy = "set logger.wandb.mode=auto, which logs offline without an account"
        if os.environ.get("WANDB_MODE") == mode:
            place = "WANDB_MODE"
            remedy = "set WANDB_MODE=offline, which needs no account"
        raise UserError(
            f"{place}={mode} is rejected by wandb: {reason}; run `wandb login`, or {remedy}"
        ) from None
    except wandb.errors.CommError as error:
        reason = " ".join(str(error).split())
        logger.warning("wandb cannot be reached (%s); logging offline", reason)
        with contextlib.suppress(SystemExit):  # of its process, which it ends like this one
            wandb.teardown()  # it would take the same run for a second one
        return wandb.init(mode="offline", settings=quiet, **arguments)


def id_of(directory: RunDirectory) -> str:
    """Return the id of the wandb run of `directory`; a sweep's agent sets it, or we draw it.

    The jobs of a sweep of ours have one variable, but are several runs.
    """
    path = directory.wandb_id
    path.parent.mkdir(exist_ok=True)  # else wandb uses the system's temporary folder
    known = known_id(path, WANDB_ID)
    if known is not None:
        return known
    new = in_sweep(directory, os.environ.get(RUN_ID)) or secrets.token_hex(4)
    replace_text(path, new)
    return new


def leave_other_sweep(run_id: str) -> None:
    """Drop the variable of an agent's sweep if the agent's run is not this directory's run.

    That is so after a resume, in a sweep of ours, or where a shell has kept the variable.
    """
    if os.environ.get(SWEEP_ID) and os.environ.get(RUN_ID) != run_id:
        logger.warning(
            "this run is not of the sweep that %s=%s names: its wandb run is %s",
            SWEEP_ID,
            os.environ.pop(SWEEP_ID),
            run_id,
        )


def name_of(directory: RunDirectory, run_name: str) -> str:
    """Return the wandb run's name: `run_name`, or the variable, if that is only the folder's."""
    if run_name != directory.path.name:
        return run_name
    return in_sweep(directory, os.environ.get("WANDB_NAME")) or run_name


def in_sweep(directory: RunDirectory, value: str | None) -> str | None:
    """Return a variable's value, with the job's name where other jobs have the same value."""
    return f"{value}-{directory.path.name}" if value and sweep_of(directory) else value


def owner_of(directory: RunDirectory, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the project and the entity of the run's first start: elsewhere, its id is another's.

    Args:
        directory: the run.
        arguments: of `wandb.init` now.
    """
    known = directory.notes().get("wandb")
    if known is None:
        known = {
            "project": arguments.get("project") or os.environ.get("WANDB_PROJECT") or program(),
            "entity": arguments.get("entity") or os.environ.get("WANDB_ENTITY"),
        }
        directory.note("wandb", known)
    return dict(known)


def refuse_full_disk(folder: Path) -> None:
    """Raise an `OSError` if the disk of `folder` is full, which wandb only notes in its own log."""
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        if is_unsupported(error):
            return
        raise
    free = disk.f_bavail
    if os.geteuid() == 0:
        free = disk.f_bfree
    if disk.f_blocks > 0 and free == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def define_axes(run: Run) -> None:
    """Draw every metric over our steps, and choose what the table of runs shows."""
    run.define_metric(STEP)
    for name in ("trainer/tokens", "*"):
        run.define_metric(name, step_metric=STEP)
    for name, summary in SUMMARIES.items():
        run.define_metric(name, step_metric=STEP, summary=summary)


def log_checkpoints(run: Run, directory: RunDirectory) -> None:
    """Log the best and the last checkpoint with their checksums, as versions of one artifact."""
    summary = directory.read_summary()
    aliases: dict[str, list[str]] = {}  # path -> aliases; one file may be both
    for name, alias in (("best_checkpoint", "best"), ("last_checkpoint", "latest")):
        path = summary.get(name)
        if path:
            aliases.setdefault(path, [Path(path).stem]).append(alias)
    for path, names in aliases.items():
        artifact = wandb.Artifact(f"{run.id}-checkpoint", type="model")
        for file in files_of(Path(path)):
            artifact.add_file(str(file))
        run.log_artifact(artifact, aliases=names)
