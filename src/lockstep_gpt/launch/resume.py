"""`resume=auto`: continue a run in its own directory, with the few settings that may change."""

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lockstep_gpt.config import (
    Config,
    from_container,
    settings_on_resume,
    with_defaults,
)
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import (
    checks,
    choices,
    compose,
    devices,
    launcher,
    start,
    trust,
)
from lockstep_gpt.launch.arguments import quote_paths
from lockstep_gpt.launch.hydra_errors import as_user_error
from lockstep_gpt.run import directory as runs
from lockstep_gpt.run.checkpoint import fault_of
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.settings import as_typed

# Overrides that select the run, and don't change it.
ADDRESS = ("run_dir", "resume", "trust_run_dir")
OF_MACHINE = ("trainer.devices", "trainer.accelerator")  # and those marked on_resume="machine"
DECIDED_ONCE = ("batch.global_size", "data.fingerprint")  # at the start of a run, if null


def run_to_resume(arguments: list[str]) -> RunDirectory | None:
    """Return the run that `run_dir=X resume=auto` means, if nothing needs composing for it."""
    typed = dict(word.split("=", 1) for word in arguments if "=" in word)
    if typed.get("resume") != "auto" or "run_dir" not in typed:
        return None
    if any(_names_group(name) for name in typed):
        return None
    run = RunDirectory(Path(typed["run_dir"]))
    if not run.config.is_file():
        return None
    return run


def train_or_resume(composed: DictConfig) -> tuple[int, float]:
    """Resume the run that this same command, including group choices, started; or start it."""
    values, config = compose.resolve_config(composed)
    run = start.run_of(config)
    if config.resume != "auto" or not run.config.is_file():
        if config.resume == "auto":
            logging.info("run_dir=%s does not exist yet: starting a new run", run.path)
        return start.train_once(values, config)
    overrides = [word for word in compose.overrides() if not _names_group(word)]
    resolved = start.resolved_values(values, devices.place(config), run)
    if config.batch.global_size is None:
        resolved["batch"] = {**resolved["batch"], "global_size": run.load().batch.global_size}
    _refuse_other_choices(run, resolved, overrides)
    status = resume(run, overrides, resolved)
    return status, float(run.read_summary().get("val_loss") or "nan")


def _refuse_other_choices(
    run: RunDirectory, resolved: dict[str, Any], overrides: list[str]
) -> None:
    """Reject composed settings that differ from the frozen ones.

    The settings of `overrides` may differ: `resume` checks them next.
    """
    free = {
        *ADDRESS,
        *OF_MACHINE,
        *settings_on_resume("machine", resolved["data"].get("_target_")),
        *(_setting_of(override) for override in _parse(overrides)),
    }
    if run.overrides.is_file():  # changes of earlier resumes stay
        free |= {line.split()[2].rstrip(":") for line in run.overrides.read_text().splitlines()}
    # A setting that an earlier version lacked is not a difference.
    frozen = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(resolved, run.values())))
    lines = runs.differences(frozen, resolved)
    differing = sorted(line for line in lines if line.partition("=")[0] not in free)
    if differing:
        run.load()  # raises if this version can't read it
        raise UserError(
            f"run_dir={run.path} keeps its choices, but got {runs.some_of(differing)}; use the "
            f"same, or start a new run with resume={run.path}"
        )


def resume(run: RunDirectory, arguments: list[str], composed: dict[str, Any] | None = None) -> int:
    """Resume a run in its own directory, and return its exit status.

    Args:
        run: it has a frozen configuration.
        arguments: overrides of single settings, and those in `ADDRESS`.
        composed: what this command would freeze in a new run; it needs no permission.

    Raises:
        UserError: a setting can't change, or the directory may not be used.
    """
    before = run.values()
    values, changes = _updated_values(run, arguments)
    with as_user_error(arguments, run.load):  # the frozen file may be wrong
        config = from_container(values)
    checks.refuse_conflicts(config)
    placement, steps = start.place_run(config)
    is_forced = _sets_switch(arguments, "resume_force") and bool(changes)
    if not is_forced and _is_done(run, steps):
        if os.environ.get("RANK", "0") == "0":  # only one of a launcher's ranks prints
            print(f"{run.path} is done; raise max_steps to train it longer")
        return 0
    resolved = {**values, "trainer": start.resolved_trainer(values, placement)}
    permit = partial(trust.permit, run, _sets_switch(arguments, "trust_run_dir"), composed)
    if not launcher.is_inside_launcher():  # of a launcher's ranks, only rank 0 needs permission
        permit()
    return start.start(ResumedRun(run, config, resolved, before, changes, permit))


@dataclass
class ResumedRun:
    """The start of a run that continues in its own directory."""

    run: RunDirectory
    config: Config
    values: dict[str, Any]
    before: dict[str, Any]  # the values that are frozen now
    changes: list[str]  # what the command changes of them, as lines
    permit: Callable[[], None]

    def check(self) -> None:
        """Raise a `UserError` if the directory is somebody else's and not trusted."""
        self._logged = 0
        if self.run.overrides.exists():
            self._logged = self.run.overrides.stat().st_size
        self.permit()
        refuse_unwritable(self.run)

    def freeze(self, values: dict[str, Any]) -> None:
        """Freeze the changed values, and add the changes to the log of overrides."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with self.run.writing(UserError):
            with self.run.overrides.open("a", encoding="utf-8") as file:
                file.writelines(f"{now}  {change}\n" for change in self.changes)
            self.run.refreeze(values)
        print(f"resuming {self.run.path}", *self.changes, sep="\n  ")

    def undo(self) -> None:
        """Freeze the earlier values again, and remove the changes from the log."""
        self.run.refreeze(self.before)
        os.truncate(self.run.overrides, self._logged)


def refuse_unwritable(run: RunDirectory) -> None:
    """Raise a `UserError` if checkpoints could not be saved, before training for hours."""
    folder = run.checkpoints
    if not folder.exists():
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".try-"):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return  # it is the whole disk, which freezing the configuration reports
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); make it a folder that you may write"
        ) from None


def _is_done(run: RunDirectory, steps: int) -> bool:
    """Return whether the run is done, with an intact last checkpoint and at least `steps` steps."""
    summary = run.read_summary()
    checkpoint = run.checkpoints / Path(summary.get("last_checkpoint") or "none").name
    ended = summary.get("status") == "done" and summary["step"] >= steps
    return ended and fault_of(checkpoint) is None


def _updated_values(run: RunDirectory, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the frozen values updated by the command, and the changes; or raise `UserError`."""
    base = OmegaConf.create(with_defaults(run.values()))
    changes = []
    for override in _parse(arguments):
        name = _setting_of(override)
        if name in ADDRESS:
            continue
        if _names_group(name) or override.is_sweep_override() or override.is_delete():
            raise UserError(
                f"{override.input_line} cannot change in a resumed run; give single settings, or "
                f"start a new run from it with resume={run.path}"
            )
        old = OmegaConf.select(base, name)
        new = override.value()
        if new is None and name in DECIDED_ONCE:  # already decided
            continue
        OmegaConf.update(base, name, new, force_add=True)
        if new != old and name != "resume_force":
            changes.append(f"{name}: {as_typed(old)} -> {as_typed(new)}")
    values = cast(dict[str, Any], OmegaConf.to_container(base))
    if not _sets_switch(arguments, "resume_force"):
        runs.refuse_another_identity(f"run_dir={run.path}", run.values(), values)
    changed_data = {change.partition(":")[0] for change in changes if change.startswith("data.")}
    if changed_data & settings_on_resume("kept", values["data"].get("_target_")):
        values["data"]["fingerprint"] = None  # recomputed, as these settings change the data
    return values, changes


def _sets_switch(arguments: list[str], switch: str) -> bool:
    """Return whether this command sets a switch; earlier commands don't count."""
    return f"{switch}=true" in map(str.lower, arguments)


def _parse(arguments: list[str]) -> list[Override]:
    with as_user_error(arguments):
        return list(OverridesParser.create().parse_overrides(quote_paths(arguments)))


def _setting_of(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+~")


def _names_group(word: str) -> bool:
    """Return whether an override, or its name, is a group's choice."""
    return word.partition("=")[0].partition("@")[0].lstrip("+~") in choices.group_names()
