"""`resume=auto`: continue a run in its own directory, with the few settings that may change."""

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lockstep_gpt import config as schema
from lockstep_gpt import run_directory as runs
from lockstep_gpt.config import UserError, as_typed
from lockstep_gpt.launch import choices, compose, devices, start
from lockstep_gpt.registry import asked
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.runtime.checkpoint import fault_of

# Overrides that select the run, and don't change it.
ADDRESS = ("run_dir", "resume", "trust_run_dir")
OF_MACHINE = ("trainer.devices", "trainer.accelerator")  # and those marked on_resume="machine"
DECIDED_ONCE = ("batch.global_size", "data.fingerprint")  # at the start of a run, if null


def run_to_resume(arguments: list[str]) -> RunDirectory | None:
    """Return the run that `run_dir=X resume=auto` means, if nothing needs composing for it."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    if given.get("resume") != "auto" or "run_dir" not in given or any(map(_names_group, given)):
        return None
    run = RunDirectory(Path(given["run_dir"]))
    return run if run.config.is_file() else None


def train_or_resume(composed: DictConfig) -> tuple[int, float]:
    """Resume the run that this same command, including group choices, started; or start it."""
    values, config = compose.checked(composed)
    run = start.run_of(config)
    if config.resume != "auto" or not run.config.is_file():
        if config.resume == "auto":
            logging.info("run_dir=%s does not exist yet: starting a new run", run.path)
        return start.train_once(values, config)
    singles = [word for word in compose.overrides() if not _names_group(word)]
    settled = start.settle(values, devices.place(config), run)
    if config.batch.global_size is None:
        settled["batch"] = {**settled["batch"], "global_size": run.load().batch.global_size}
    _refuse_other_choices(run, settled, singles)
    status = resume(run, singles, settled)
    return status, float(run.read_summary().get("val_loss") or "nan")


def _refuse_other_choices(run: RunDirectory, settled: dict[str, Any], singles: list[str]) -> None:
    """Reject composed settings that differ from the frozen ones; `singles` may, and come next."""
    free = {
        *ADDRESS,
        *OF_MACHINE,
        *schema.settings_on_resume("machine"),
        *(each.get_key_element().lstrip("+~") for each in _parse(singles)),
    }
    if run.overrides.is_file():  # changes of earlier resumes stay
        free |= {line.split()[2].rstrip(":") for line in run.overrides.read_text().splitlines()}
    # A setting that an earlier version lacked is not a difference.
    known = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(settled, run.values())))
    found = runs.differences(known, settled)
    differing = sorted(line for line in found if line.partition("=")[0] not in free)
    if differing:
        run.load()  # raises if this version can't read it
        raise UserError(
            f"run_dir={run.path} keeps its choices, but got {runs.some_of(differing)}; use the "
            f"same, or start a new run with resume={run.path}"
        )


def resume(run: RunDirectory, arguments: list[str], composed: dict[str, Any] | None = None) -> int:
    """Resume a run in its own directory; settings `composed` by a command need no permission."""
    before, logged = run.values(), run.overrides.stat().st_size if run.overrides.exists() else 0
    values, changes = _revive(run, arguments)
    with compose.told_in_one_line(arguments, run.load):  # the frozen file may be wrong
        config = schema.from_container(values)
    placement, steps = start.placed(config)
    if not (_says(arguments, "resume_force") and changes) and _is_done(run, steps):
        if os.environ.get("RANK", "0") == "0":  # only one of a launcher's ranks prints
            print(f"{run.path} is done; raise max_steps to train it longer")
        return 0
    settled = {**values, "trainer": start.trainer_settled(values, placement)}
    permit = partial(asked, "PERMIT", run, _says(arguments, "trust_run_dir"), composed)

    def refreeze(named: dict[str, Any]) -> None:
        with run.writing(UserError):
            with run.overrides.open("a", encoding="utf-8") as file:  # what changes, and when
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                file.writelines(f"{now}  {change}\n" for change in changes)
            run.refreeze(named)
        print("\n".join([f"resuming {run.path}", *(f"  {change}" for change in changes)]))

    def undo() -> None:
        run.refreeze(before)
        os.truncate(run.overrides, logged)

    if not devices.is_inside_launcher():  # there rank 0 asks for all; here each node does
        permit()
    return start.begin(run, settled, config, permit, refreeze, undo)


def _is_done(run: RunDirectory, steps: int) -> bool:
    """Return whether the run is done, with an intact last checkpoint and at least `steps` steps."""
    summary = run.read_summary()
    kept = run.checkpoints / Path(summary.get("last_checkpoint") or "none").name
    ended = summary.get("status") == "done" and summary["step"] >= steps
    return ended and fault_of(kept) is None


def _revive(run: RunDirectory, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the frozen values updated by the command, and the changes; or raise `UserError`."""
    base = OmegaConf.create(run.values())
    changes = []
    for override in _parse(arguments):
        name = override.get_key_element().lstrip("+~")
        if name in ADDRESS:
            continue
        if _names_group(name) or override.is_sweep_override() or override.is_delete():
            raise UserError(
                f"{override.input_line} cannot change in a resumed run; give single settings, or "
                f"start a new run from it with resume={run.path}"
            )
        old, new = OmegaConf.select(base, name), override.value()
        if new is None and name in DECIDED_ONCE:  # already decided
            continue
        OmegaConf.update(base, name, new, force_add=True)
        if new != old and name != "resume_force":
            changes.append(f"{name}: {as_typed(old)} -> {as_typed(new)}")
    values = cast(dict[str, Any], OmegaConf.to_container(base))
    if not _says(arguments, "resume_force"):
        runs.refuse_another_identity(f"run_dir={run.path}", run.values(), values)
    data = [change.partition(":")[0] for change in changes if change.startswith("data.")]
    if schema.settings_on_resume("kept").intersection(data):
        values["data"]["fingerprint"] = None  # recomputed, as these settings change the data
    return values, changes


def _says(arguments: list[str], switch: str) -> bool:
    """Return whether this command sets a switch; earlier commands don't count."""
    return f"{switch}=true" in map(str.lower, arguments)


def _parse(arguments: list[str]) -> list[Override]:
    with compose.told_in_one_line(arguments):
        return list(OverridesParser.create().parse_overrides(compose.quoted(arguments)))


def _names_group(word: str) -> bool:
    """Return whether an override, or its name, is a group's choice."""
    return word.partition("=")[0].partition("@")[0].lstrip("+~") in choices.groups()
