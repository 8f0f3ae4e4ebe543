"""`lockstep-gpt train` and `prepare`: compose once, freeze into the run directory, start the ranks.

This process stays light: it never imports torch, so that a mistake is answered at once and what
must be set before torch starts (threads, allocator) can be set for the ranks.
"""

from __future__ import annotations

import logging
import math
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lockstep_gpt import compose, devices, joining, process, resuming
from lockstep_gpt.config import PROGRAM, Config, UserError
from lockstep_gpt.data import prepare as data_prepare
from lockstep_gpt.data import shards
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training import schedule

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}


def train(arguments: list[str]) -> int:
    """Train once, or once for each job of a sweep; return the worst exit status."""
    if run := resuming.run_to_resume(arguments):
        return _resume(run, arguments)
    flags = [word for word in arguments if word in ("-m", "--multirun")]
    if flags:  # to the front: Hydra's parser wants all overrides in one row
        arguments = [*flags, *(word for word in arguments if word not in flags)]
        if devices.is_inside_launcher():
            raise UserError("--multirun inside a launcher would sweep on every rank; drop torchrun")
        if not any(word.startswith("run_dir=") for word in arguments):
            arguments = [*arguments, f"run_dir={_new_name('sweep')}"]
    return _each_job("train", arguments, _train)


def prepare(arguments: list[str]) -> int:
    """Make the token files of a data choice, and check them against the model's context."""
    if "--help" in arguments:
        print(f"usage: {PROGRAM} prepare [data=CHOICE] [data.SETTING=VALUE ...]")
        print(f"Takes the settings of {PROGRAM} train, which prepares as well where it must.")
        return 0

    def job(composed: DictConfig) -> tuple[int, float]:
        _, config = compose.checked(composed)
        _set_up_logging(config)
        _prepared(config)
        return 0, math.nan

    return _each_job("prepare", arguments, job)


def _each_job(
    command: str, arguments: list[str], job: Callable[[DictConfig], tuple[int, float]]
) -> int:
    """Run `job` for each configuration that `arguments` make; one that fails hides no other."""
    results: list[tuple[str, int, float]] = []

    def guarded(composed: DictConfig) -> float:
        given = HydraConfig.get().overrides.task
        swept = " ".join(override for override in given if override not in arguments)
        if _is_sweep():
            print(f"job {len(results)}: {swept}", flush=True)
        try:
            status, metric = job(composed)
        except UserError as error:
            print(f"{PROGRAM} {command}: {error}", file=sys.stderr)
            status, metric = 2, math.nan
        results.append((swept, status, metric))
        return metric

    compose.run(arguments, guarded)
    if len(results) > 1:
        print("\n".join(["", "job  exit  val_loss", *map(_job_line, enumerate(results))]))
    return max((status for _, status, _ in results), default=0)


def _job_line(numbered: tuple[int, tuple[str, int, float]]) -> str:
    number, (swept, status, metric) = numbered
    return f"{number:3}  {status:4}  {metric:8.4f}  {swept}"


def _is_sweep() -> bool:
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def _train(composed: DictConfig) -> tuple[int, float]:
    """Run one training to its end; return its exit status and its validation loss."""
    values, config = compose.checked(composed)
    placement = _placed(config)
    run = RunDirectory(_run_path(config))
    settled = _settled(values, placement, run)

    def create() -> RunDirectory:
        run.refuse_if_used()
        _prepared(config)
        run.create(settled)
        return run

    if devices.is_inside_launcher():
        return joining.join_run(settled, config, create, run.discard), math.nan
    status = _start(create(), config)
    if status == 2:
        run.discard()
    return status, float(run.read_summary().get("val_loss") or math.nan)


def _resume(run: RunDirectory, arguments: list[str]) -> int:
    """Go on with a run in its own directory; return the exit status."""
    before = run.values()
    values, changes = resuming.revive(run, arguments)
    config = compose.typed(values, arguments)
    placement = _placed(config)
    settled = {**values, "trainer": _trainer_settled(values, placement)}

    def create() -> RunDirectory:
        _prepared(config)
        run.refreeze(settled)
        resuming.log_overrides(run, changes)
        print("\n".join([f"resuming {run.path}", *(f"  {change}" for change in changes)]))
        return run

    if devices.is_inside_launcher():
        return joining.join_run(settled, config, create, lambda: run.refreeze(before))
    status = _start(create(), config)
    if status == 2:
        run.refreeze(before)
    return status


def _placed(config: Config) -> devices.Placement:
    """Find the devices, and refuse what their number makes impossible."""
    _set_up_logging(config)
    placement = devices.place(config)
    batch = schedule.plan_batch(
        config.batch, config.model.block_size, placement.devices, placement.nodes
    )
    schedule.plan_schedule(config, batch)
    return placement


def _start(run: RunDirectory, config: Config) -> int:
    return _run_inline(run) if config.launch.inline else _supervise(run)


def _set_up_logging(config: Config) -> None:
    logging.basicConfig(level=LEVELS[config.verbosity], format="%(message)s", stream=sys.stdout)


def _prepared(config: Config) -> Path:
    """Prepare the data before any rank starts: its faults are answered here, once."""
    folder = data_prepare.prepare(config.data)
    shards.check_block_size(shards.load_index(folder), config.model.block_size)
    return folder


def _run_path(config: Config) -> Path:
    """Name the run directory; jobs of a sweep get a numbered one each below it."""
    job = HydraConfig.get()
    choices = job.runtime.choices
    path = Path(config.run_dir or _new_name(choices["model"], choices["data"]))
    return path / str(job.job.num) if _is_sweep() else path


def _new_name(*parts: str) -> str:
    """Name a directory after the time; two launches in one second must not meet."""
    date = time.strftime("%Y%m%d-%H%M%S")
    return "/".join(["runs", "-".join([date, *parts, secrets.token_hex(2)])])


def _settled(
    values: dict[str, Any], placement: devices.Placement, run: RunDirectory
) -> dict[str, Any]:
    """Return `values` with everything decided that ranks could otherwise decide differently."""
    choices = HydraConfig.get().runtime.choices
    world = placement.devices * placement.nodes
    name = f"{choices['model']}-{choices['data']}-{world}-{time.strftime('%Y%m%d-%H%M%S')}"
    return {
        **values,
        "run_dir": str(run.path),
        "run_name": values["run_name"] or name,
        "trainer": _trainer_settled(values, placement),
        "logger": _logger_settled(values, run),
    }


def _logger_settled(values: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    """Group the runs of a sweep in wandb, unless they have a group."""
    loggers = dict(values["logger"])
    if _is_sweep() and "wandb" in loggers:
        group = loggers["wandb"].get("group") or run.path.parent.name
        loggers["wandb"] = {**loggers["wandb"], "group": group}
    return loggers


def _trainer_settled(values: dict[str, Any], placement: devices.Placement) -> dict[str, Any]:
    found = {"accelerator": placement.accelerator, "devices": placement.devices}
    return {**values["trainer"], **found}


def _run_inline(run: RunDirectory) -> int:
    """Run the one rank here, where a debugger sees it."""
    from lockstep_gpt.training import train as rank

    return rank.main(run)


def _supervise(run: RunDirectory) -> int:
    """Start the ranks' agent, pass our signals on to it, and return the run's exit status."""
    passed: list[int] = []
    # In a session of its own: a Ctrl-C reaches the ranks once, through us.
    agent = subprocess.Popen(process.command("agent", run), start_new_session=True)

    def forward(signum: int, _frame: FrameType | None) -> None:
        impatient = signum == signal.SIGINT and signal.SIGINT in passed
        passed.append(signum)
        agent.send_signal(signal.SIGKILL if impatient else signum)

    before = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    try:
        status = agent.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if status < 0:  # it was killed itself, by us or by somebody else
        status = 128 + passed[0] if passed else 1
    if status == 1:  # also if no rank was left to say so
        run.write_summary({**run.read_summary(), "status": "failed"})
    return status
