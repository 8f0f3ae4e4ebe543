"""Decides, before ranks start, what each of them could otherwise decide differently."""

import time
from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.run.directory import RunDirectory


def is_sweep() -> bool:
    """Return whether this is a job of a sweep."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def runs_elsewhere() -> bool:
    """Return whether a launcher plugin runs this job in another process, perhaps elsewhere."""
    hydra = HydraConfig.get()
    return is_sweep() and hydra.runtime.choices.get("hydra/launcher") != "basic"


def resolved_values(
    values: dict[str, Any], placement: Placement, run: RunDirectory
) -> dict[str, Any]:
    """Return `values` with everything decided that ranks could otherwise decide differently."""
    choices = HydraConfig.get().runtime.choices
    world_size = placement.world_size
    name = f"{'-'.join(named_after(choices))}-{world_size}-{time.strftime('%Y%m%d-%H%M%S')}"
    batch = values["batch"]
    data_parallel = world_size // values["strategy"].get("tensor_parallel", 1)
    global_size = batch["global_size"] or batch["micro_size"] * data_parallel
    return {
        **values,
        "run_dir": str(run.path),
        "run_name": values["run_name"] or name.replace("/", "-"),
        "batch": {**batch, "global_size": global_size},
        "trainer": resolved_trainer(values, placement),
        "logger": loggers_of_job(values["logger"], run),
    }


def named_after(choices: Mapping[str, Any]) -> tuple[str, str]:
    """Return the choices by which runs are told apart: the model's or the module's, and the data's.

    Args:
        choices: group -> its choice.
    """
    is_gpt = choices["module"] == "gpt"
    return str(choices["model" if is_gpt else "module"]), str(choices["data"])


def loggers_of_job(loggers: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    """Return the loggers' settings; in a sweep, a run's group is the sweep."""
    if not is_sweep():
        return loggers
    sweep = run.path.parent.name
    return {name: with_sweep_as_group(node, sweep) for name, node in loggers.items()}


def with_sweep_as_group(logger: Any, sweep: str) -> Any:
    """Return a logger's settings with the name of the sweep as its group, unless one is set."""
    if isinstance(logger, dict) and "group" in logger and logger["group"] is None:
        return {**logger, "group": sweep}
    return logger


def resolved_trainer(values: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """Return the settings of the Trainer with the devices that were found."""
    return {**values["trainer"], "accelerator": placement.accelerator, "devices": placement.devices}
