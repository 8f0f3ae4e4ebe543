"""`lockstep-gpt train` and `prepare`: once, or once for each job of a sweep."""

import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep_gpt import PROGRAM, standard_streams, stop_signals
from lockstep_gpt.errors import ReportedError, RunError, UserError, refusing_long_names
from lockstep_gpt.launch import compose, launcher, resolving, resume, start
from lockstep_gpt.launch.arguments import MULTIRUN
from lockstep_gpt.logs import LEVELS, log_to_stdout
from lockstep_gpt.processes import print_error
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.settings import as_column


@standard_streams.never_failing()
@log_to_stdout()
def train(arguments: list[str]) -> int:
    """Train once, or once for each job of a sweep; return the worst exit status."""
    launcher.end_with_launcher()
    if launcher.is_inside_launcher():
        stop_signals.end_at_once()  # until there is something to save
    else:
        stop_signals.install(has_keyboard=True).interrupt()
    flags = [word for word in arguments if word in MULTIRUN]
    if flags:
        _refuse_sweep_in_run(arguments)
    run = resume.run_to_resume(arguments)
    if run is not None:
        return resume.resume(run, arguments)
    if flags:
        # To the front: Hydra's parser needs all overrides in one sequence.
        arguments = [*flags, *(word for word in arguments if word not in flags)]
        if launcher.is_inside_launcher():
            raise UserError("--multirun would start a sweep on every rank; run it without torchrun")
        if not any(word.startswith("run_dir=") for word in arguments):
            arguments = [*arguments, f"run_dir={start.new_name('sweep')}"]
    return _run_jobs("train", arguments, resume.train_or_resume)


def _refuse_sweep_in_run(arguments: list[str]) -> None:
    """Raise a `UserError` if the folder of a sweep is the directory of a run."""
    for word in arguments:
        name, _, path = word.partition("=")
        if name == "run_dir" and RunDirectory(Path(path)).config.is_file():
            raise UserError(
                f"{word} is a run, but with --multirun, run_dir is a folder of runs; set "
                f"run_dir={path}-sweep, or leave --multirun out"
            )


@log_to_stdout()
def prepare(arguments: list[str]) -> int:
    """Create the token files of a data choice, and check them against the model's context."""
    if "--help" in arguments:
        print(f"usage: {PROGRAM} prepare [--verify] [data=CHOICE] [data.SETTING=VALUE ...]")
        print(f"Tokenize a dataset, as {PROGRAM} train does if needed, with the same settings.")
        print("--verify compares existing token files with their SHA-256.")
        return 0

    stop_signals.install(has_keyboard=True).interrupt()

    def job(composed: DictConfig) -> tuple[int, float]:
        _, config = compose.resolve_config(composed)
        logging.getLogger().setLevel(LEVELS[config.verbosity])
        start.prepare_data(config, "--verify" in arguments, tell=True)
        return 0, math.nan

    return _run_jobs("prepare", [word for word in arguments if word != "--verify"], job)


class _SweepStopped(BaseException):
    """A signal ended a job and so the sweep; not an `Exception`, which Hydra would store."""


def _run_jobs(
    command: str, arguments: list[str], job: Callable[[DictConfig], tuple[int, float]]
) -> int:
    """Run `job` for each configuration; a failure doesn't stop the rest, a signal does.

    Args:
        command: its name, for errors.
        arguments: the overrides, which may describe a sweep.
        job: takes a composed configuration; returns its exit status and its value of
            `checkpoint.monitor`.

    Returns:
        the worst exit status.

    Raises:
        ReportedError: a job failed in another process, where a launcher plugin ran it.
    """
    results: list[tuple[str, int, float]] = []
    monitored = ("", "")

    def run_job(composed: DictConfig) -> float:
        nonlocal monitored
        monitored = composed.checkpoint.monitor, composed.checkpoint.mode
        if resolving.is_sweep():
            stop_signals.received.interrupt()
        words = [word for word in compose.overrides() if word not in arguments]
        swept = " ".join(word.lstrip("+") for word in words)
        if resolving.is_sweep():
            print(f"job {HydraConfig.get().job.num}: {swept}", flush=True)
        try:
            with refusing_long_names():
                status, metric = job(composed)
        except (UserError, RunError) as error:
            print_error(f"{PROGRAM} {command}: {error}")
            status = error.status
            metric = math.nan
        if status and resolving.runs_elsewhere():  # only an exception comes back from there
            raise ReportedError(status)
        results.append((swept, status, metric))
        if status > 128 and resolving.is_sweep():
            raise _SweepStopped
        return metric

    with contextlib.suppress(_SweepStopped):
        compose.run(arguments, run_job)
    if len(results) > 1:
        _print_table(results, *monitored)
    return max((status for _, status, _ in results), default=0)


def _print_table(results: list[tuple[str, int, float]], monitor: str, mode: str) -> None:
    """Print a row for each job: what it swept, its exit status, and its value of `monitor`."""
    metrics = [metric for _, status, metric in results if status == 0 and not math.isnan(metric)]
    if mode == "max":
        best, word = max(metrics, default=math.nan), "highest"
    else:
        best, word = min(metrics, default=math.nan), "lowest"
    print(f"\njob  exit  {as_column(monitor):>8}")
    for number, (swept, status, metric) in enumerate(results):
        mark = f"  ({word})" if metric == best else ""
        print(f"{number:3}  {status:4}  {metric:8.4f}  {swept}{mark}")
