"""The job that Hydra runs: its directory, its overrides, and its values, to freeze."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lockstep.damaged_files import readable
from lockstep.errors import UserError
from lockstep.launch.placement import Placement
from lockstep.run import trust
from lockstep.run.directory import OUTPUT_DIR, RunDirectory, flat
from lockstep.whole_files import replace_text

logger = logging.getLogger(__name__)

# Later versions warn about the name of 1.3.
if hydra.__version__.startswith("1.3."):
    register_resolver: Any = OmegaConf.register_new_resolver
else:
    register_resolver = OmegaConf.register_resolver

HYDRA_FILE = Path(".hydra/hydra.yaml")  # Hydra's own configuration, in the directory of a job
# A reference to another setting, such as `${batch.global_size}`, or to where the run is, which may
# be moved. Others with `:` call a function.
REFERENCE = re.compile(r"\$\{[^${}:]+\}|" + re.escape(OUTPUT_DIR))


def is_named_after_time() -> bool:
    """Return whether Hydra makes a new folder for each start of this job, named after the time."""
    node = HydraConfig.instance().cfg
    raw: Any = OmegaConf.to_container(node, resolve=False) if node is not None else {}
    return "${now" in str(raw["hydra"]["run"]["dir"])


def is_sweep() -> bool:
    """Return whether this is a job of a sweep."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def runs_elsewhere() -> bool:
    """Return whether a launcher plugin runs this job in another process, perhaps elsewhere."""
    choices = HydraConfig.get().runtime.choices
    return is_sweep() and choices.get("hydra/launcher") != "basic"


def choices() -> dict[str, str]:
    """Return what was chosen from each group, by the group's name."""
    chosen = HydraConfig.get().runtime.choices
    return {str(group): str(choice) for group, choice in chosen.items()}


def hydras_files() -> set[str]:
    """Return the names that Hydra gives to what it writes where a job runs."""
    job = HydraConfig.get()
    logged: Any = OmegaConf.to_container(job.job_logging, resolve=True) or {}
    handlers = (logged.get("handlers") or {}).values()
    logs = {Path(handler["filename"]).name for handler in handlers if "filename" in handler}
    return {*logs, HYDRA_FILE.parts[0], *filter(None, [job.output_subdir])}


def keep_hydra(run: RunDirectory, values: dict[str, Any]) -> dict[str, Any]:
    """Keep Hydra's own configuration for the ranks of a new run; return `values`.

    What is there already may be of a start that was killed, or of somebody else.
    """
    file = run.path / HYDRA_FILE
    text = OmegaConf.to_yaml(OmegaConf.create({"hydra": HydraConfig.get()}))
    with run.writing(UserError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    trust.permit_settings(_logging_settings(HydraConfig.instance().cfg), (), True, "", "")
    return values


def restore_hydra(run: RunDirectory) -> None:
    """Keep Hydra's own configuration for the ranks of a run that continues, as it began.

    If a copy of the run lacks the file, or it is damaged, this command's takes its place.
    """
    if (run.path / HYDRA_FILE).exists():
        try:
            recorded(run, {})
        except UserError as fault:
            logger.warning("%s; this command's takes its place", fault)
        else:
            return
    keep_hydra(run, {})


def recorded(run: RunDirectory, values: dict[str, Any]) -> DictConfig:
    """Return the configuration of a run's ranks with Hydra's own, as a job of Hydra has it.

    Args:
        run: has Hydra's file.
        values: the other settings, to which Hydra's own may refer.

    Raises:
        UserError: the file is unreadable or damaged.
    """
    file = run.path / HYDRA_FILE
    node = OmegaConf.structured(HydraConf)
    OmegaConf.set_struct(node, False)
    config = OmegaConf.create({"hydra": node})
    with readable(file):
        content = file.read_bytes()
    try:
        kept: Any = OmegaConf.create(content.decode())
        config.merge_with({"hydra": kept["hydra"]})
    except (yaml.YAMLError, OmegaConfBaseException, LookupError, TypeError, ValueError):
        raise UserError(f"{file} is damaged") from None
    config.merge_with(values)
    return config


def permit_logging(run: RunDirectory, trusted: bool) -> None:
    """Raise a `UserError` if a run's logging is someone else's: it can write any file.

    Args:
        run: it continues.
        trusted: whether the user says that its author is trusted.
    """
    try:
        config = recorded(run, run.values())
    except UserError:  # it will be replaced
        return
    settings = _logging_settings(config)
    known = _logging_settings(HydraConfig.instance().cfg)
    file = f"run_dir={run.path}: its {HYDRA_FILE}"
    trust.permit_settings(settings, known, trusted, file, "trust_run_dir=true")


def _logging_settings(config: Any) -> list[str]:
    """Return the settings of a job's logging, except those that can't run any code."""
    logged: Any = OmegaConf.to_container(config.hydra.job_logging, resolve=False) or {}
    return [
        f"hydra.job_logging.{name}={value}"
        for name, value in flat(logged)
        if name not in ("version", "disable_existing_loggers") and value is not None
    ]


def remove_traces(run: RunDirectory) -> None:
    """Remove what Hydra has made for a job that didn't start, if there is nothing else."""
    with contextlib.suppress(OSError):  # it isn't there, or isn't ours
        names = {path.name for path in run.path.iterdir()}
        if not names <= run.others or any(_has_text(run.path / name) for name in names):
            return
        shutil.rmtree(run.path, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs are in it
        for folder in run.path.absolute().parents:
            if not folder.is_relative_to(Path.cwd()) or folder == Path.cwd():
                break
            folder.rmdir()


def _has_text(path: Path) -> bool:
    """Return whether this is a log in which something is written."""
    return path.is_file() and path.stat().st_size > 0


def overrides() -> list[str]:
    """Return the job's own overrides: in a sweep, with one value each."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(word).lstrip("+") for word in cast(list[Any], words)]


def swept_overrides(words: Sequence[str]) -> list[str]:
    """Return the job's overrides that differ between jobs: those whose typed value has a choice.

    Args:
        words: of the command line.
    """
    typed = [word.lstrip("+~").partition("=") for word in words]
    fixed = {name for name, _, value in typed if not re.search(r"[,(]", value)}
    return [word for word in overrides() if word.partition("=")[0] not in fixed]


def values_to_freeze(config: DictConfig) -> dict[str, Any]:
    """Return plain values, in which only two kinds of references stay.

    Those to other settings stay, so that a resume may change what they refer to. Those that read
    the environment stay, because it may contain secrets, which belong in no file of a run. What
    depends on the time, on Hydra, or on functions of the program's own is resolved, once.
    """
    reads: list[str] = []

    def read(name: str, *default: Any) -> Any:
        reads.append(name)
        return oc.env(name, *default)

    register_resolver("oc.env", read, replace=True)
    try:
        return cast(dict[str, Any], _plain(config, reads))
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}; set it") from None
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def _plain(node: Any, reads: list[str]) -> Any:
    if not isinstance(node, DictConfig | ListConfig):
        return node
    raw: Any = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, ListConfig):
        return [_plain_child(node, index, raw[index], reads) for index in range(len(node))]
    return {key: _plain_child(node, key, raw[key], reads) for key in node}


def _plain_child(parent: Any, key: Any, raw: Any, reads: list[str]) -> Any:
    if OmegaConf.is_missing(parent, key):
        return raw
    if isinstance(raw, str) and "${" in raw and "${" not in REFERENCE.sub("", raw):
        return raw
    reads.clear()
    value = parent[key]
    if reads:
        return raw
    return _plain(value, reads)


def with_devices(values: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """Return `values` with the devices that were found, if they configure a Trainer."""
    if not isinstance(values.get("trainer"), dict):
        return values
    found = {"accelerator": placement.accelerator, "devices": placement.devices}
    return {**values, "trainer": {**values["trainer"], **found}}
