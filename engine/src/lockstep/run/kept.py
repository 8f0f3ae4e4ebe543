"""Settings that a run keeps: what makes it this experiment and not another one."""

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lockstep.building import imported
from lockstep.errors import UserError
from lockstep.run.directory import flat, settled, some_of
from lockstep.settings import as_typed


def refuse_other_experiment(
    where: str, saved: Mapping[str, Any], ours: Mapping[str, Any], kept: Collection[str]
) -> None:
    """Raise a `UserError` if settings that a run keeps differ between `saved` and `ours`.

    An argument that only one of them lists is no difference if it has its default value: a new
    setting of a class leaves old runs as they were.

    Args:
        where: what has the saved settings, as typed, such as `resume=PATH`.
        saved: a whole configuration.
        ours: the one of this command.
        kept: names of settings and of groups, such as `seed` and `model`.
    """
    theirs = _kept_settings(saved, kept)
    mine = _kept_settings(ours, kept)
    differing = [
        f"{name}={as_typed(mine.get(name))} instead of {as_typed(theirs.get(name))}"
        for name in {**theirs, **mine}
        if theirs.get(name) != mine.get(name)
        and not _is_open(name, theirs, kept)
        and not _is_default(name, theirs, mine)
    ]
    if not differing:
        return
    remedy = "use the same, or set resume_force=true"
    run = Path(where.removeprefix("resume=")).parent.parent  # of a checkpoint
    if where.startswith("resume=") and (run / "config.yaml").is_file():
        remedy += f"; to continue the run itself: run_dir={run} resume=auto"
    raise UserError(f"{where} keeps its settings, but got {some_of(differing)}; {remedy}")


def _is_open(name: str, saved: Mapping[str, Any], kept: Collection[str]) -> bool:
    """Return whether a setting was null, to be decided; the arguments of a kept group never are."""
    return name in kept and name in saved and saved[name] is None


def _is_default(name: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Return whether only one of two configurations lists an argument, with its default value."""
    group, _, argument = name.rpartition(".")
    target = mine.get(f"{group}._target_")
    if (name in theirs) == (name in mine) or target is None:
        return False
    if theirs.get(f"{group}._target_") != target:
        return False
    parameter = inspect.signature(imported(target, group)).parameters.get(argument)
    return parameter is not None and parameter.default == {**theirs, **mine}[name]


def _kept_settings(values: Mapping[str, Any], kept: Collection[str]) -> dict[str, Any]:
    """Return the settings of these names and groups, each by its full name.

    A reference to another setting is that setting's value. A reference to a group stays a text:
    `kept` says what of that group is compared.
    """
    groups = tuple(f"{name}." for name in kept)
    plain = json.loads(json.dumps(values, default=str))
    meant = dict(flat(settled(plain)))
    return {
        name: meant.get(name, value)
        for name, value in flat(plain)
        if name in kept or name.startswith(groups)
    }
