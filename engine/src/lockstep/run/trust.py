"""Keeps a run directory from someone else from running code that only its config.yaml names."""

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep import project
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory, flat, settled, some_of

# Only classes, not all that is reachable: `torch.serialization.os.system` isn't part of torch.
OURS = Path(__file__).parents[1] / "configs"
PUBLIC = r"lightning\.pytorch\.(callbacks|loggers|plugins|profilers|strategies)\.[A-Z]\w*"


def own_folders() -> list[Path]:
    """Return the folder of the program's YAML files; others may be someone else's."""
    if not HydraConfig.initialized():
        return []
    # Missing if a test has composed the configuration, as projects' own tests do.
    config: Any = HydraConfig.get()
    sources = OmegaConf.select(config, "runtime.config_sources", default=None) or ()
    return [Path(source.path) for source in sources if source.provider == "main"]


def foreign_settings(values: dict[str, Any], folders: Iterable[Path]) -> list[str]:
    """Return settings of targets that neither YAML files nor Lightning have, and references.

    Those to other settings are replaced by what they mean.

    Args:
        values: a whole configuration.
        folders: of YAML files that are known, besides the engine's.
    """
    files = [path for folder in [*folders, OURS] for path in folder.rglob("*.yaml")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    our_targets = re.findall(r"_target_: (\S+)", text)
    settings = list(flat(settled(values)))
    nodes = []  # prefixes of the settings to return
    for name, value in settings:
        is_target = name.endswith("_target_")
        is_known = value in our_targets or re.fullmatch(PUBLIC, str(value))
        if _refers(value) or (is_target and not is_known):
            nodes.append(name.removesuffix("_target_"))
    return [f"{name}={value}" for name, value in settings if name.startswith(tuple(nodes))]


def _refers(value: Any) -> bool:
    """Return whether a value refers to something, or is a list that has a node of a class."""
    if isinstance(value, dict):
        return "_target_" in value or any(map(_refers, value.values()))
    if isinstance(value, list):
        return any(map(_refers, value))
    return "${" in str(value)


def permit(run: RunDirectory, trusted: bool, composed: dict[str, Any] | None = None) -> None:
    """Record for this user that `run` may build what it names; if not, raise a `UserError`."""
    file = f"run_dir={run.path}: its config.yaml"
    permit_values(run.values(), trusted, file, "trust_run_dir=true", composed)


def permit_values(
    values: dict[str, Any],
    trusted: bool,
    file: str,
    remedy: str,
    composed: dict[str, Any] | None = None,
    folders: Iterable[Path] | None = None,
) -> None:
    """Record for this user that `values` may be built; if not, raise a `UserError`.

    Args:
        values: a whole configuration.
        trusted: whether the user says that its author is trusted.
        file: where it is, for the error.
        remedy: how the user says so.
        composed: another one, of the user's own command, which needs no permission.
        folders: of YAML files whose targets need none either; None: those of this command.
    """
    configs = own_folders() if folders is None else [*folders]
    known = foreign_settings(composed or {}, configs)
    permit_settings(foreign_settings(values, configs), known, trusted, file, remedy)


def permit_settings(
    settings: list[str], known: Collection[str], trusted: bool, file: str, remedy: str
) -> None:
    """Record for this user that `settings` may be used; if not, raise a `UserError`.

    Args:
        settings: those that could run code, each as typed.
        known: those that need no permission.
        trusted: whether the user says that their author is trusted.
        file: where they are, for the error.
        remedy: how the user says so.
    """
    # `Path.expanduser` would raise if there is no home.
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    record = Path("/", state, "lockstep", "built", digest)
    if not (trusted or set(settings) <= {*known} or os.access(record, os.F_OK)):
        raise UserError(
            f"{file} has {some_of(settings)}, which no run that you started here has used; if you "
            f"trust its author, set {remedy}"
        )
    if settings:
        with contextlib.suppress(OSError):  # without a record, commands need trust_run_dir again
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()


def refuse_foreign(
    path: Path, values: dict[str, Any], groups: Collection[str], trusted: bool
) -> None:
    """Raise a `UserError` for classes of someone else in what a command builds of a checkpoint.

    Known are those that the project's settings and Lightning have, and those of runs that were
    started here.

    Args:
        path: of the checkpoint, for the error.
        values: its whole configuration, or its run's.
        groups: what the command builds.
        trusted: whether the user says that the author is trusted.
    """
    configs = [project.current().configs]
    whole = settled(values)
    built = {name: whole[name] for name in groups if name in whole}
    if foreign_settings(built, configs):
        permit_values(values, trusted, f"{path}: its configuration", "--trust", folders=configs)
