"""`resume=auto`: go on with a run in its own directory, with the few settings that may change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lockstep_gpt.config import UserError, as_typed
from lockstep_gpt.launch import compose, devices, start
from lockstep_gpt.registry import addition
from lockstep_gpt.run_directory import RunDirectory

# Words of the command line that say which run, not what changes in it.
ADDRESS = ("run_dir", "resume")
# What decides the shape of the weights and the samples of a step; dropout and loaders do not.
IDENTITY = ("model.", "data.")
HARMLESS = ("model.dropout", "data.root", "data.num_workers", "data.val_tokens")


def run_to_resume(arguments: list[str]) -> RunDirectory | None:
    """Return the run that `run_dir=X resume=auto` means, if there is one to go on with."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    if given.get("resume") != "auto" or "run_dir" not in given:
        return None
    run = RunDirectory(Path(given["run_dir"]))
    return run if run.config.is_file() else None


def resume(run: RunDirectory, arguments: list[str]) -> int:
    """Go on with a run in its own directory; return the exit status."""
    before = run.values()
    values, changes = _revive(run, arguments)
    config = compose.typed(values, arguments)
    placement = start.placed(config)
    settled = {**values, "trainer": start.trainer_settled(values, placement)}

    def create() -> RunDirectory:
        start.prepared(config)
        run.refreeze(settled)
        _log_overrides(run, changes)
        print("\n".join([f"resuming {run.path}", *(f"  {change}" for change in changes)]))
        return run

    if devices.is_inside_launcher():
        return start.join(settled, config, create, lambda: run.refreeze(before))
    if placement.nodes > 1:
        return int(addition("START_ON_NODES")(run, settled, config, create))
    status = start.start(create(), config)
    if status == 2:
        run.refreeze(before)
    return status


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
