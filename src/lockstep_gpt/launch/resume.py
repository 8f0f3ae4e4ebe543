"""`resume=auto`: continue a run in its own directory, with the few settings that may change."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lockstep_gpt.config import (
    Config,
    from_container,
    settings_on_resume,
    with_defaults,
)
from lockstep_gpt.damaged_files import read_informative_text, readable
from lockstep_gpt.tokens.prepare import refuse_other_tokens
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import (
    checks,
    compose,
    launcher,
    resolving,
    start,
    usable_files,
)
from lockstep_gpt.launch.hydra_errors import as_user_error
from lockstep_gpt.launch.resumed_choices import (
    changes_of_group,
    decided_by,
    may_differ,
    names_group,
    parsed,
    sets_switch,
    setting_of,
    typed_choices,
)
from lockstep_gpt.run import directory as runs
from lockstep_gpt.run import last_line, trust
from lockstep_gpt.run.checkpoint import checkpoints_in, step_of
from lockstep_gpt.run.checkpoint_sums import fault_of
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.memory.ending import state_left
from lockstep_gpt.settings import as_typed, check, counted
from lockstep_gpt.whole_files import replacing

# A line of overrides.log names a setting after the date and the time.
CHANGE = re.compile(r"^\S+ \S+  (\S+): ", re.MULTILINE)
# Overrides that select the run, and don't change it.
ADDRESS = ("run_dir", "resume", "trust_run_dir")
OF_MACHINE = ("trainer.devices", "trainer.accelerator")  # and those marked on_resume="machine"
DECIDED_ONCE = ("batch.global_size", "data.fingerprint")  # at the start of a run, if null


def run_to_resume(arguments: list[str]) -> RunDirectory | None:
    """Return the run that `run_dir=X resume=auto` means, if nothing needs composing for it."""
    typed = dict(word.split("=", 1) for word in arguments if "=" in word)
    if typed.get("resume") != "auto" or "run_dir" not in typed:
        return None
    if any(names_group(name) for name in typed):
        return None
    run = RunDirectory(Path(typed["run_dir"]))
    with readable(run.path):
        is_run = run.config.is_file()
    return run if is_run else None


def train_or_resume(composed: DictConfig) -> tuple[int, float]:
    """Resume the run that `run_dir` names, or start it."""
    with as_user_error(compose.overrides()):
        run = start.run_of(composed.run_dir)
        continues = composed.resume == "auto"
    if continues and run.config.is_file():
        status = _resume_with_choices(run, composed)
        return status, run.monitored_value()
    values, config = compose.resolve_config(composed)
    if continues and composed.run_dir is None and not resolving.is_sweep():
        raise UserError(
            "resume=auto needs run_dir=runs/NAME, the run to continue or to start; "
            "set it, or leave resume=auto out"
        )
    if continues:
        run.refuse_if_used()
        print(f"{run.path.resolve()} does not exist yet: starting a new run")
    return start.train_once(values, config)


def _resume_with_choices(run: RunDirectory, composed: DictConfig) -> int:
    """Resume a run with a command that also makes choices of groups; return its exit status.

    What is composed is a mixture of these choices and of defaults, so only the choices count.
    """
    words = compose.overrides()
    with as_user_error(words):
        values = compose.values_to_freeze(composed)
    values["logger"] = resolving.loggers_of_job(values["logger"], run)
    if values["batch"]["global_size"] is None:
        values["batch"]["global_size"] = run.load().batch.global_size
    typed = typed_choices(words)
    overrides = [word for word in words if not names_group(word)]
    _refuse_other_choices(run, values, typed, overrides)
    strategy = values["strategy"] if "strategy" in typed else None
    return resume(run, overrides, values, strategy)


def _refuse_other_choices(
    run: RunDirectory, composed: dict[str, Any], typed: dict[str, str], overrides: list[str]
) -> None:
    """Reject settings of `typed` choices that differ from the frozen ones.

    The settings of `overrides` may differ: `resume` checks them next.
    """
    free = {
        *ADDRESS,
        *OF_MACHINE,
        *settings_on_resume("machine", composed["data"].get("_target_")),
        *(setting_of(override) for override in parsed(overrides)),
    }
    changes = read_informative_text(run.overrides)  # of earlier resumes, which stay
    free |= set(CHANGE.findall(changes))
    # A setting that an earlier version lacked is not a difference.
    frozen = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(composed, run.values())))
    is_decided = decided_by(typed)
    differing = {}  # setting -> line
    for line in runs.differences(frozen, composed):
        name = line.partition("=")[0]
        group = name.partition(".")[0]
        may_change = name in free or may_differ(group, typed)
        if is_decided(name) and not may_change:
            differing[name] = line
    if differing:
        run.load()  # raises if this version can't read it
        # Those of a typed choice first: an experiment sets many others.
        names = sorted(differing, key=lambda name: (name.partition(".")[0] not in typed, name))
        choices = " ".join(f"{group}={choice}" for group, choice in typed.items())
        raise UserError(
            f"run_dir={run.path} keeps its choices, but got "
            f"{runs.some_of([differing[name] for name in names])}; use the same, leave "
            f"{choices} out, as the run has its own, or start a new run with resume={run.path}"
        )


def resume(
    run: RunDirectory,
    arguments: list[str],
    composed: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
) -> int:
    """Resume a run in its own directory, and return its exit status.

    Args:
        run: it has a frozen configuration.
        arguments: overrides of single settings, and those in `ADDRESS`.
        composed: what this command would freeze in a new run; it needs no permission.
        strategy: settings of the strategy that this command has chosen; None: the run's.

    Raises:
        UserError: a setting can't change, or the directory may not be used.
    """
    before = run.values()
    values, changes = _updated_values(run, arguments, strategy)
    with as_user_error(arguments, run.load):  # the frozen file may be wrong
        config = from_container(values)
    checks.refuse_conflicts(config)
    checks.refuse_settings_of_gpt(config, arguments)
    sets_devices = "trainer.devices" in map(setting_of, parsed(arguments))
    placement, _ = start.place_run(config, is_resumed=not sets_devices)
    devices = before["trainer"].get("devices")
    if not sets_devices and placement.devices != devices:
        changes.append(f"trainer.devices: {devices} -> {placement.devices}")
    steps = config.max_steps
    is_forced = sets_switch(arguments, "resume_force") and bool(changes)
    if not is_forced and _is_done(run, steps):
        if os.environ.get("RANK", "0") == "0":  # only one of a launcher's ranks prints
            print(last_line.of_done(run, steps, f"max_steps={2 * steps}"))
        return 0
    usable_files.refuse_unusable(run)
    if not config.resume_force:
        _refuse_fewer_steps(run, steps)
    resolved = {
        **values,
        "trainer": resolving.resolved_trainer(values, placement),
    }
    permit = partial(trust.permit, run, sets_switch(arguments, "trust_run_dir"), composed)
    if not launcher.is_inside_launcher():  # of a launcher's ranks, only rank 0 needs permission
        permit()
    return start.start(ResumedRun(run, config, resolved, changes, permit))


@dataclass
class ResumedRun:
    """The start of a run that continues in its own directory."""

    run: RunDirectory
    config: Config
    values: dict[str, Any]
    changes: list[str]  # what the command changes of them, as lines
    permit: Callable[[], None]
    function: str = start.RANK
    is_named = True

    def prepare(self, values: dict[str, Any]) -> dict[str, Any]:
        """Prepare the data; return the values with the fingerprint of its tokens."""
        return start.prepare_gpt(values)

    def check(self) -> None:
        """Raise a `UserError` if the directory is not trusted, or a new path has other text."""
        self.permit()
        usable_files.refuse_unwritable_checkpoints(self.run)
        is_moved = any(change.startswith("data.path:") for change in self.changes)
        if is_moved and self.values["data"].get("fingerprint") is not None:
            place = f"data.path={as_typed(self.values['data']['path'])}"
            refuse_other_tokens(self.config.data, place, self.run.path)

    def freeze(self, values: dict[str, Any]) -> None:
        """Freeze the changed values, and add the changes to the log of overrides."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        files = (self.run.config, self.run.overrides)
        self._files = {path: path.read_bytes() if path.exists() else None for path in files}
        with self.run.writing(UserError):
            with replacing(self.run.overrides) as file:
                file.write(self._files[self.run.overrides] or b"")
                file.writelines(f"{now}  {change}\n".encode() for change in self.changes)
            self.run.refreeze(values)
        print(f"resuming {self.run.path}", *self.changes, sep="\n  ")

    def undo(self) -> None:
        """Restore the files that `freeze` has changed."""
        for path, content in self._files.items():
            if content is None:
                path.unlink(missing_ok=True)
                continue
            with replacing(path) as file:
                file.write(content)


def _is_done(run: RunDirectory, steps: int) -> bool:
    """Return whether the run is done, with an intact last checkpoint and at least `steps` steps."""
    summary = run.read_summary()
    checkpoint = run.checkpoints / Path(summary.get("last_checkpoint") or "none").name
    ended = summary.get("status") == "done" and summary.get("step", 0) >= steps
    return ended and fault_of(checkpoint) is None


def _refuse_fewer_steps(run: RunDirectory, steps: int) -> None:
    """Raise a `UserError` for a run of fewer steps than one of its intact checkpoints has."""
    later = (path for path in checkpoints_in(run.checkpoints) if step_of(path) > steps)
    reached = max((step_of(path) for path in later if fault_of(path) is None), default=steps)
    kept = state_left(run)
    if kept is not None:
        reached = max(reached, kept.step)
    rule = (
        f"ends the run after {counted(steps, 'step')}, but run_dir={run.path} has already reached "
        f"step {reached}; raise max_steps, or train less in a new run"
    )
    check("max_steps", steps, reached <= steps, rule)


def _updated_values(
    run: RunDirectory, arguments: list[str], strategy: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the frozen values updated by the command, and the changes; or raise `UserError`."""
    frozen = with_defaults(run.values())
    changes = []
    if strategy is not None:
        changes += changes_of_group("strategy", frozen["strategy"], strategy)
        frozen["strategy"] = strategy
    base = OmegaConf.create(frozen)
    for override in parsed(arguments):
        name = setting_of(override)
        if name in ADDRESS:
            continue
        if names_group(name) or override.is_sweep_override() or override.is_delete():
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
    if not sets_switch(arguments, "resume_force"):
        runs.refuse_another_identity(f"run_dir={run.path}", run.values(), values)
    changed_data = {change.partition(":")[0] for change in changes if change.startswith("data.")}
    if changed_data & settings_on_resume("kept", values["data"].get("_target_")):
        values["data"]["fingerprint"] = None  # recomputed, as these settings change the data
    return values, changes
