"""`resume=auto`: the recorded configuration of a run, with this command's overrides on top."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lockstep.errors import UserError
from lockstep.launch import devices, hydra_job, launcher, start, usable_files
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.run import trust
from lockstep.run.directory import RunDirectory, flat
from lockstep.run.kept import refuse_other_experiment
from lockstep.run.last_line import resume_command
from lockstep.settings import as_typed, counted
from lockstep.whole_files import replacing

# What selects a run, and does not change it.
DEVICES = ("trainer.accelerator", "trainer.devices")  # found anew by each command
ADDRESS = ("run_dir", "resume", "resume_force", "trust_run_dir")


def resume(
    reference: str | None,
    call: Callable[..., int],
    run: RunDirectory,
    values: dict[str, Any],
    merged: dict[str, Any],
) -> tuple[int, Any]:
    """Continue a run in its own directory; return the exit status, and the function's value.

    Args:
        reference: what each rank calls, as text; see `rank_program`.
        call: the same, for ranks in this process.
        run: it has a frozen configuration.
        values: what this command has composed.
        merged: the frozen configuration with this command's overrides; see `with_overrides`.

    Raises:
        UserError: the command changes what makes the run this experiment.
    """
    recorded = run.values()
    with naming_file(run):
        settings = LaunchSettings.of(merged)
    is_open = "trainer.devices" not in (word.partition("=")[0] for word in hydra_job.overrides())
    placement = devices.found(merged, settings, is_open=is_open)
    devices.refuse_half(merged, placement)
    with naming_file(run):
        devices.spread_batches(merged, placement, settings.min_nodes, run.notes())
    merged = {**hydra_job.with_devices(merged, placement), "run_dir": str(run.path)}
    if not values.get("resume_force"):
        where = f"run_dir={run.path}"
        kept = recorded.get("kept", ())
        refuse_other_experiment(where, recorded, merged, kept)
        if any(_chooses_a_whole(override, values) for override in _overrides()):
            refuse_other_experiment(where, recorded, values, kept)
    changes = changes_between(recorded, merged)
    summary = run.read_summary()
    if summary.get("status") == "done" and not changes:
        if os.environ.get("RANK", "0") == "0":  # only one of a launcher's ranks prints
            print(_done(run, recorded, summary))
        return 0, summary.get("value", math.nan)
    usable_files.refuse_unusable(run)
    permit = partial(_permit, run, bool(values.get("trust_run_dir")), values)
    if not launcher.is_inside_launcher():  # of a launcher's ranks, only rank 0 needs permission
        permit()
    continued = ContinuedRun(run, merged, reference or "", changes, permit)
    status = start.start(continued, call)
    return status, math.nan if status else run.read_summary().get("value", math.nan)


@contextlib.contextmanager
def naming_file(run: RunDirectory) -> Iterator[None]:
    """Name the run's frozen file in the refusal of a setting that this command doesn't set."""
    try:
        yield
    except UserError as mistake:
        words = re.match(r"[\w.]+", str(mistake))
        setting = words[0] if words else ""
        if any(setting.startswith(_place_of(override)) for override in _overrides()):
            raise
        raise UserError(f"{run.config}: {mistake}") from None


def _permit(run: RunDirectory, trusted: bool, composed: dict[str, Any]) -> None:
    """Raise a `UserError` if the run's files name what could be someone else's code."""
    trust.permit(run, trusted, composed)
    hydra_job.permit_logging(run, trusted)


def _done(run: RunDirectory, recorded: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return the only line of a command that resumes a run that is done."""
    step = summary.get("step")
    line = f"{run.path} is done after {counted(step, 'step')}" if step else f"{run.path} is done"
    steps = recorded.get("max_steps")
    if not isinstance(steps, int):
        return line
    return f"{line}; to train it longer: {resume_command(run)} max_steps={2 * steps}"


def with_overrides(recorded: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded values with what this command's overrides set in `values`.

    A chosen file of a group replaces that group. One that sets settings of several groups, such as
    an experiment, replaces nothing: the record has what it has set.
    """
    merged = OmegaConf.create(recorded)
    for override in _overrides():
        name = _place_of(override)
        if _chooses_a_whole(override, values):
            continue
        if override.is_delete():
            _remove(merged, name)
            continue
        plain: Any = values
        for part in name.split("."):
            plain = plain[part]
        OmegaConf.update(merged, name, plain, merge=False, force_add=True)
    return cast(dict[str, Any], OmegaConf.to_container(merged, resolve=False))


def _overrides() -> list[Override]:
    """Return this command's overrides."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return OverridesParser.create().parse_overrides(cast(list[str], words))


def _place_of(override: Override) -> str:
    """Return the name of what an override sets, or of where the chosen file of a group is."""
    return override.package or override.key_or_group.replace("/", ".")


def _chooses_a_whole(override: Override, values: dict[str, Any]) -> bool:
    """Return whether an override chooses a file of settings of several groups."""
    is_choice = override.key_or_group in HydraConfig.get().runtime.choices
    return is_choice and OmegaConf.select(OmegaConf.create(values), _place_of(override)) is None


def _remove(merged: DictConfig, name: str) -> None:
    parent, _, last = name.rpartition(".")
    node = OmegaConf.select(merged, parent) if parent else merged
    if isinstance(node, DictConfig):
        node.pop(last, None)


def refuse_other_job(
    run: RunDirectory, merged: dict[str, Any], values: dict[str, Any], swept: Sequence[str]
) -> None:
    """Raise a `UserError` if a sweep's job finds a run with other values of what is swept.

    A sweep numbers its jobs, so another sweep's run has the same name. Its loss would be taken for
    that of this job.

    Args:
        run: has the job's name.
        merged: its recorded values with this command's overrides.
        values: what this job has composed.
        swept: the job's overrides that differ between jobs.
    """
    recorded = run.values()
    overrides = OverridesParser.create().parse_overrides([*swept])
    if any(_chooses_a_whole(override, values) for override in overrides):
        places, wanted = [""], values
    else:
        places, wanted = [_place_of(override) for override in overrides], merged
    old, new = dict(flat(recorded)), dict(flat(wanted))
    for name in {**old, **new}:
        is_swept = any(place in ("", name) or name.startswith(f"{place}.") for place in places)
        if is_swept and old.get(name) != new.get(name) and name not in (*ADDRESS, *DEVICES):
            raise UserError(
                f"{run.path} has {name}={as_typed(old.get(name))}, and job "
                f"{HydraConfig.get().job.num} of this sweep {name}={as_typed(new.get(name))}: it "
                "is of another sweep; repeat that sweep's command, or set another run_dir"
            )


def changes_between(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """List what differs, each as `setting: old -> new`."""
    old, new = dict(flat(before)), dict(flat(after))
    return [
        f"{name}: {as_typed(old.get(name))} -> {as_typed(new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name not in ADDRESS
    ]


@dataclass
class ContinuedRun:
    """The start of a run that continues in its own directory."""

    run: RunDirectory
    values: dict[str, Any]
    function: str
    changes: list[str]  # of the configuration, as lines
    permit: Any
    is_named = True

    def check(self) -> None:
        """Raise a `UserError` if the directory is not trusted, or its folder can't be written."""
        self.permit()
        usable_files.refuse_unwritable_checkpoints(self.run)

    def prepare(self, values: dict[str, Any]) -> dict[str, Any]:
        """Restore what ranks read beside the configuration, if it is away; return the values."""
        hydra_job.restore_hydra(self.run)
        return values

    def freeze(self, values: dict[str, Any]) -> None:
        """Freeze the changed values, and add the changes to the log of overrides."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        run = self.run
        # Ranks write the last three.
        files = (run.config, run.overrides, run.summary, run.failed, run.decided)
        self._files = {path: path.read_bytes() if path.exists() else None for path in files}
        with self.run.writing(UserError):
            with replacing(self.run.overrides) as file:
                file.write(self._files[self.run.overrides] or b"")
                file.writelines(f"{now}  {change}\n".encode() for change in self.changes)
            self.run.refreeze(values)
        print(f"resuming {self.run.path}", *self.changes, sep="\n  ")

    def undo(self) -> None:
        """Restore the files that `freeze`, and ranks that refused to train, have changed."""
        for path, content in self._files.items():
            if content is None:
                path.unlink(missing_ok=True)
                continue
            with replacing(path) as file:
                file.write(content)
