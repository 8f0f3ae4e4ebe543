"""`lockstep-gpt train` and `prepare`: compose once, freeze the result, start the ranks.

This process stays light: it never imports torch, so that a mistake is answered at once and what
must be set before torch starts (threads, allocator) can be set for the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lockstep_gpt import compose, machine
from lockstep_gpt.config import LEVELS, PROGRAM, Config, UserError, as_typed
from lockstep_gpt.data import prepare as data_prepare
from lockstep_gpt.data import shards
from lockstep_gpt.run_directory import RunDirectory, differences
from lockstep_gpt.training import schedule

# Words of the command line that say which run, not what changes in it.
ADDRESS = ("run_dir", "resume")
# What decides the shape of the weights and the samples of a step; dropout and loaders do not.
IDENTITY = ("model.", "data.")
HARMLESS = ("model.dropout", "data.root", "data.num_workers", "data.val_tokens")


@contextlib.contextmanager
def _speaking() -> Iterator[None]:
    """Write log records to standard output while a command runs."""
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stdout)
    before = root.handlers, root.level
    root.handlers = [handler]
    try:
        yield
    finally:
        root.handlers = before[0]
        root.setLevel(before[1])


@_speaking()
def train(arguments: list[str]) -> int:
    """Train once, or once for each job of a sweep; return the worst exit status."""
    if run := _run_to_resume(arguments):
        return _resume(run, arguments)
    flags = [word for word in arguments if word in ("-m", "--multirun")]
    if flags:  # to the front: Hydra's parser wants all overrides in one row
        arguments = [*flags, *(word for word in arguments if word not in flags)]
        if machine.is_inside_launcher():
            raise UserError("--multirun inside a launcher would sweep on every rank; drop torchrun")
        if not any(word.startswith("run_dir=") for word in arguments):
            arguments = [*arguments, f"run_dir={_new_name('sweep')}"]
    return _each_job("train", arguments, _train)


@_speaking()
def prepare(arguments: list[str]) -> int:
    """Make the token files of a data choice, and check them against the model's context."""
    if "--help" in arguments:
        print(f"usage: {PROGRAM} prepare [--verify] [data=CHOICE] [data.SETTING=VALUE ...]")
        print(f"Takes the settings of {PROGRAM} train, which prepares as well where it must.")
        print("--verify compares every byte of what is there already with its SHA-256.")
        return 0

    def job(composed: DictConfig) -> tuple[int, float]:
        _, config = compose.checked(composed)
        logging.getLogger().setLevel(LEVELS[config.verbosity])
        _prepared(config, "--verify" in arguments)
        return 0, math.nan

    return _each_job("prepare", [word for word in arguments if word != "--verify"], job)


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

    with machine.sharing_servers():
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

    if machine.is_inside_launcher():
        return _join(settled, config, create, run.discard), math.nan
    if placement.nodes > 1:
        return _start_on_nodes(run, settled, config, create), math.nan
    status = _start(create(), config)
    if status == 2:
        run.discard()
    return status, float(run.read_summary().get("val_loss") or math.nan)


def _resume(run: RunDirectory, arguments: list[str]) -> int:
    """Go on with a run in its own directory; return the exit status."""
    before = run.values()
    values, changes = _revive(run, arguments)
    config = compose.typed(values, arguments)
    placement = _placed(config)
    settled = {**values, "trainer": _trainer_settled(values, placement)}

    def create() -> RunDirectory:
        _prepared(config)
        run.refreeze(settled)
        _log_overrides(run, changes)
        print("\n".join([f"resuming {run.path}", *(f"  {change}" for change in changes)]))
        return run

    if machine.is_inside_launcher():
        return _join(settled, config, create, lambda: run.refreeze(before))
    if placement.nodes > 1:
        return _start_on_nodes(run, settled, config, create)
    status = _start(create(), config)
    if status == 2:
        run.refreeze(before)
    return status


def _placed(config: Config) -> machine.Placement:
    """Find the devices, and refuse what their number makes impossible."""
    logging.getLogger().setLevel(LEVELS[config.verbosity])
    placement = machine.place(config)
    batch = schedule.plan_batch(
        config.batch, config.model.block_size, placement.devices, placement.nodes
    )
    schedule.plan_schedule(config, batch)
    return placement


def _start(run: RunDirectory, config: Config) -> int:
    return _run_inline(run) if config.launch.inline else machine.supervise(run)


def _start_on_nodes(
    run: RunDirectory,
    settled: dict[str, Any],
    config: Config,
    create: Callable[[], RunDirectory],
) -> int:
    """Be one of several machines: the first freezes the configuration, the others compare.

    Raises:
        UserError: a setting that several machines need is missing, or theirs do not agree.
    """
    launch, nodes = config.launch, config.trainer["num_nodes"]
    for name, value in (
        ("run_dir", config.run_dir),
        ("launch.rdzv_endpoint", launch.rdzv_endpoint),
    ):
        if value is None:
            raise UserError(f"{name}=null with trainer.num_nodes={nodes}; set it alike on all")
    if launch.node_rank >= nodes:
        raise UserError(f"launch.node_rank={launch.node_rank} must be below {nodes}, from 0 on")
    assert launch.rdzv_endpoint is not None
    machine.own_address(launch.rdzv_endpoint)
    if launch.node_rank == 0:
        create()
    else:
        _prepared(config)
        _wait_for_first_node(run, settled, launch.join_seconds)
    return machine.supervise(run, launch.node_rank)


def _wait_for_first_node(run: RunDirectory, settled: dict[str, Any], seconds: float) -> None:
    """Wait until the shared run directory holds the configuration that this machine has."""
    end = time.monotonic() + seconds
    fault = "has no config.yaml; is it a folder that all machines share, and machine 0 started?"
    while time.monotonic() < end:
        if run.config.is_file():
            differing = differences(run.values(), settled)
            if not differing:
                return
            fault = f"is of another configuration than this machine's: {', '.join(differing)}"
        time.sleep(0.2)
    raise UserError(f"run_dir={run.path}: after {seconds:g} s it {fault}")


def _prepared(config: Config, verify: bool = False) -> Path:
    """Prepare the data before any rank starts: its faults are answered here, once."""
    folder = data_prepare.prepare(config.data, verify)
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
    values: dict[str, Any], placement: machine.Placement, run: RunDirectory
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


def _trainer_settled(values: dict[str, Any], placement: machine.Placement) -> dict[str, Any]:
    found = {"accelerator": placement.accelerator, "devices": placement.devices}
    return {**values["trainer"], **found}


def _join(
    values: dict[str, Any],
    config: Config,
    create: Callable[[], RunDirectory],
    undo: Callable[[], None],
) -> int:
    """Be a rank of the launcher that has started this process; return the exit status."""
    from lockstep_gpt.training import ranks
    from lockstep_gpt.training import train as rank

    try:
        ranks.join(ranks.Ranks.from_environment(), config)
    except (OSError, RuntimeError) as error:  # torch's own errors of a store are of the latter
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the launcher's ranks cannot meet at {place} ({str(error).splitlines()[0]}); start "
            "all of them, with a free MASTER_PORT of a machine that all reach"
        ) from None
    run = ranks.agree(values, create, undo)
    status = 2 if run is None else rank.main(run)
    if status == machine.LOST_PEERS:
        machine.end_process(status)
    return status


def _run_inline(run: RunDirectory) -> int:
    """Run the one rank here, where a debugger sees it."""
    from lockstep_gpt.training import train as rank

    return rank.main(run)


def _run_to_resume(arguments: list[str]) -> RunDirectory | None:
    """Return the run that `run_dir=X resume=auto` means, if there is one to go on with."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    if given.get("resume") != "auto" or "run_dir" not in given:
        return None
    run = RunDirectory(Path(given["run_dir"]))
    return run if run.config.is_file() else None


def _revive(run: RunDirectory, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the run's frozen values with the command line's on top, and what that changes.

    Raises:
        UserError: an override is not one of a single setting, or changes what the weights or the
            samples are without `resume_force=true`.
    """
    base = OmegaConf.create(run.values())
    changes = []
    for override in _parse(arguments):
        name = override.get_key_element().lstrip("+~")
        if name in ADDRESS:
            continue
        _refuse_group(override, name, run)
        old, new = OmegaConf.select(base, name), override.value()
        OmegaConf.update(base, name, new, force_add=True)
        if new != old and name != "resume_force":
            changes.append(f"{name}: {as_typed(old)} -> {as_typed(new)}")
    values = OmegaConf.to_container(base)
    assert isinstance(values, dict)
    if not values.get("resume_force"):
        _refuse_another_identity(changes)
    return {str(name): value for name, value in values.items()}, changes


def _log_overrides(run: RunDirectory, changes: list[str]) -> None:
    """Add to `overrides.log` what this resume changes, and when."""
    with run.overrides.open("a", encoding="utf-8") as file:
        for change in changes:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {change}\n")


def _parse(arguments: list[str]) -> list[Override]:
    try:
        return list(OverridesParser.create().parse_overrides(compose.quoted(arguments)))
    except HydraException as error:
        raise UserError(compose.one_line(error, arguments)) from None


def _refuse_group(override: Override, name: str, run: RunDirectory) -> None:
    groups = {path.name for path in compose.config_folder().iterdir() if path.is_dir()}
    if name in groups or override.is_sweep_override() or override.is_delete():
        raise UserError(
            f"{override.input_line} cannot change in a resumed run; give single settings, or "
            f"start a new run from it with resume={run.path}"
        )


def _refuse_another_identity(changes: list[str]) -> None:
    for change in changes:
        if change.startswith(IDENTITY) and not change.startswith(HARMLESS):
            raise UserError(
                f"{change} makes another model or data set than the checkpoints are of; leave it, "
                "or set resume_force=true"
            )
