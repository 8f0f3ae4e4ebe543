"""`lockstep.main` stands where `hydra.main` stands, and starts the ranks of a program.

    command line + YAML -> Hydra, once, here -> frozen -> ranks, each of which calls the function

This process stays light: it doesn't import torch, so a mistake ends it at once, in one line.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep import processes, project, standard_streams, stop_signals, variables
from lockstep.errors import ReportedError, RunError, UserError, refusing_long_names
from lockstep.exits import after_signal
from lockstep.launch import composed, continued, devices, hydra_job, launcher, start, targets
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.launch.start import NewRun
from lockstep.logs import LEVELS, log_to_stdout
from lockstep.run.directory import RunDirectory
from lockstep.settings import check_choice
from lockstep.stop_signals import Interrupted


def main(
    config_path: str | None = None, config_name: str | None = None, version_base: str | None = "1.3"
) -> Callable[[Callable[..., Any]], Program]:
    """Decorate the function of a program, in the place of `hydra.main`, with the same arguments.

    The function gets the configuration, and a `Run` if it has a second argument. It is called in
    each rank, on `trainer.devices` devices of each of `trainer.num_nodes` machines. What it returns
    goes to Hydra's sweeper.

        >>> @lockstep.main("../configs", "train")
        ... def main(cfg: DictConfig, run: lockstep.Run) -> float: ...

    These settings need no place in the YAML files: `run_dir`, `run_name`, `resume` (none, auto, or
    a path), `resume_force`, `trust_run_dir`, `verbosity`, and those of `launch` (see
    `LaunchSettings`).

    Args:
        config_path: folder of the YAML files, relative to the function's file.
        config_name: name of the main file.
        version_base: as in `hydra.main`.
    """

    def decorate(function: Callable[..., Any]) -> Program:
        return Program(function, config_path, config_name, version_base)

    return decorate


class Program:
    """A function that Hydra configures and ranks call; see `main`."""

    def __init__(
        self,
        function: Callable[..., Any],
        config_path: str | None,
        config_name: str | None,
        version_base: str | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.source = composed.Source(function, config_path, config_name, version_base)
        self.reference = reference_of(function)
        self.name: str | None = None  # what to type to start it; None: as Python was started

    @classmethod
    def named(cls, reference: str, name: str, config_path: str, config_name: str) -> Program:
        """Return a program whose function only its ranks import, since that takes seconds.

        Args:
            reference: of the function that `main` decorates, as `package.module:name`.
            name: what to type to start it.
            config_path: folder of the YAML files, absolute.
            config_name: name of the main file.
        """

        def function(*arguments: Any) -> Any:
            return resolve_name(reference)(*arguments)

        program = cls(function, config_path, config_name, "1.3")
        program.reference = reference
        program.name = name
        return program

    def __call__(self, *arguments: Any) -> Any:
        """Run the command line; or call the function with a configuration that is given.

        A program that doesn't succeed ends with its exit status.
        """
        if arguments:
            return self.function(*arguments)
        status = self.run(sys.argv[1:])
        if status:
            sys.exit(status)
        return None

    def rank(self, run: RunDirectory, store: Any = None) -> int:
        """Call the function as one rank, and return the rank's exit status."""
        from lockstep.launch import rank

        function = self.function
        if self.name is not None and self.reference is not None:
            function = resolve_name(self.reference).function
        return rank.call(function, run, store)

    def run(self, words: Sequence[str]) -> int:
        """Run the program with these words of a command line; return the exit status."""
        try:
            return self._run([*words])
        except (UserError, RunError) as error:
            processes.print_error(f"{processes.program_name()}: {error}")
            return int(error.status)
        except ReportedError as error:
            return error.status
        except Interrupted as stop:
            processes.print_error(f"{processes.program_name()}: {stop} before training began")
            return after_signal(stop.signum)

    @standard_streams.never_failing()
    @log_to_stdout()
    def _run(self, words: list[str]) -> int:
        refuse_deleted_folder()
        processes.name_program(sys.modules["__main__"], self.name)
        launcher.end_with_launcher()
        variables.settle()
        if launcher.is_inside_launcher():
            stop_signals.end_at_once()  # until there is something to save
        else:
            stop_signals.install(has_keyboard=True).interrupt()
        jobs = Jobs(partial(run_job, self, words), words)
        composed.call(self.source, composed.for_hydra(words), jobs.run)
        if len(jobs.results) > 1:
            print(jobs.table())
        return jobs.status


def training() -> Program:
    """Return the training program of the current project, which only its ranks import."""
    ours = project.current()
    return Program.named(ours.train, processes.typed("train"), str(ours.configs), ours.config_name)


class Jobs:
    """The jobs of one command: one, or those of a sweep.

    Args:
        run_job: runs one with its configuration; returns its exit status and its value.
        words: of the command line, which all of them have.
    """

    def __init__(
        self, run_job: Callable[[DictConfig], tuple[int, Any]], words: Sequence[str]
    ) -> None:
        self.run_job = run_job
        self.words = words
        self.results: list[tuple[str, int, Any]] = []  # overrides, exit status, value

    @property
    def status(self) -> int:
        """The worst exit status."""
        return max((status for _, status, _ in self.results), default=0)

    def run(self, config: DictConfig) -> Any:
        """Run a job with its configuration; return the value of its function, for a sweeper.

        Raises:
            SweepStopped: a signal has ended it.
            ReportedError: it has failed in another process, where a launcher plugin ran it.
        """
        is_sweep = hydra_job.is_sweep()
        if is_sweep and launcher.is_inside_launcher():
            raise UserError("--multirun would start a sweep on every rank; run it without torchrun")
        words = " ".join(hydra_job.swept_overrides(self.words))
        if is_sweep:
            stop_signals.received.interrupt()
            print(f"job {HydraConfig.get().job.num}: {words}", flush=True)
        value: Any = math.nan
        try:
            with refusing_long_names():
                status, value = self.run_job(config)
        except (UserError, RunError) as error:
            processes.print_error(f"{processes.program_name()}: {error}")
            status = int(error.status)
        except ReportedError as error:
            status = error.status
        if status and hydra_job.runs_elsewhere():  # only an exception comes back from there
            raise ReportedError(status)
        self.results.append((words, status, value))
        if status > 128 and is_sweep:
            raise composed.SweepStopped
        return value

    def table(self) -> str:
        """Return a row for each job: how it ended, its value, and its overrides."""
        lines = ["\njob  exit     value"]
        for number, (words, status, value) in enumerate(self.results):
            text = f"{value:9.4f}" if isinstance(value, float) else f"{value!s:>9}"
            lines.append(f"{number:3}  {status:4} {text}  {words}")
        return "\n".join(lines)


def run_job(program: Program, words: Sequence[str], config: DictConfig) -> tuple[int, Any]:
    """Run a program with one configuration; return its exit status and its function's value.

    Args:
        program: what runs.
        words: of the command line.
        config: that they have composed.
    """
    run = directory_of(config)
    try:
        values = hydra_job.values_to_freeze(config)
        continues = values.get("resume") == "auto" and run.config.is_file()
        whole = continued.with_overrides(run.values(), values) if continues else values
        with continued.naming_file(run) if continues else contextlib.nullcontext():
            composed.refuse_missing(whole)
            composed.refuse_dangling(whole)
            composed.refuse_misspelled(program.source, [*words], whole)
            check_choice("verbosity", whole.get("verbosity", "normal"), tuple(LEVELS))
            composed.refuse_other_kinds(program.source, [*words], whole)
            choices = hydra_job.choices()
            set_by = partial(composed.set_by, program.source, [*words], choices)
            targets.refuse_mistakes(whole, {"*": ("*",)}, set_by)  # the function may add any
            refuse_absent(str(values.get("resume", "none")))
        is_new = values.get("run_dir") is None and hydra_job.is_named_after_time()
        if values.get("resume") == "auto" and is_new and not hydra_job.is_sweep():
            raise UserError(
                "resume=auto needs run_dir=runs/NAME, the run to continue or to start; set it, or "
                "leave resume=auto out"
            )
        logging.getLogger().setLevel(LEVELS.get(whole.get("verbosity", "normal"), logging.INFO))
        if continues and hydra_job.is_sweep():
            continued.refuse_other_job(run, whole, values, hydra_job.swept_overrides(words))
        if continues:
            return continued.resume(program.reference, program.rank, run, values, whole)
        status, value = _run_new(run, program, values)
        if status and not run.path.exists():  # it has never trained
            hydra_job.remove_traces(run)
        return status, value
    except (UserError, RunError, ReportedError, Interrupted):
        hydra_job.remove_traces(run)
        raise


def _run_new(run: RunDirectory, program: Program, values: dict[str, Any]) -> tuple[int, Any]:
    settings = LaunchSettings.of(values)
    placement = devices.found(values, settings)
    devices.refuse_half(values, placement)
    devices.spread_batches(values, placement, settings.min_nodes)
    is_named = values.get("run_dir") is not None
    values = hydra_job.with_devices({**values, "run_dir": str(run.path)}, placement)
    if program.reference is None and not settings.inline:
        raise UserError(
            "this program is not a file, which each rank could run; write it to one, or set "
            "launch.inline=true to run it here"
        )
    if values.get("resume") == "auto" and os.environ.get("RANK", "0") == "0":
        print(f"{run.path} does not exist yet: starting a new run", flush=True)
    keep_hydra = partial(hydra_job.keep_hydra, run)
    new = NewRun(run, values, program.reference or "", keep_hydra, is_named=is_named)
    status = start.start(new, program.rank)
    if launcher.is_inside_launcher() and os.environ["RANK"] != "0":
        hydra_job.remove_traces(run)  # all ranks use the directory of rank 0
    return status, value_of(run, status)


def refuse_deleted_folder() -> None:
    """Raise a `UserError` if the current folder is gone: a run may be relative to it."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder has been deleted; go to another one: cd /") from None


def refuse_absent(resume: str) -> None:
    """Raise a `UserError` if `resume` names a file or a folder that isn't there."""
    is_path = resume not in ("none", "auto", "null") and "://" not in resume
    if is_path and not Path(resume).exists():
        raise UserError(
            f"resume={resume} does not exist; give none, auto, a run directory, or a checkpoint"
        )


def value_of(run: RunDirectory, status: int) -> Any:
    """Return what a run's function returned, for a sweeper; not a number if the run failed."""
    return math.nan if status else run.read_summary().get("value", math.nan)


def directory_of(config: DictConfig) -> RunDirectory:
    """Return the directory of a job: `run_dir`, or where Hydra's job writes."""
    named = config.get("run_dir")
    job = HydraConfig.get()
    if named is None:
        path, here = Path(job.runtime.output_dir), Path.cwd()
        if path.is_relative_to(here) and path != here:  # it is, if Hydra changes to it
            path = path.relative_to(here)
        run = RunDirectory(path)
    elif hydra_job.is_sweep():
        run = RunDirectory(Path(named) / str(job.sweep.subdir))
    else:
        run = RunDirectory(Path(named))
    run.others = hydra_job.hydras_files()
    return run


def reference_of(function: Callable[..., Any]) -> str | None:
    """Return how a rank finds a function, as text; None if it is in no file, as in a notebook."""
    name = function.__qualname__
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:  # python -m
        return f"{spec.name}:{name}"
    try:
        file = Path(inspect.getfile(function)).resolve()
    except (TypeError, OSError):
        return None
    return f"{file}:{name}" if file.is_file() else None
