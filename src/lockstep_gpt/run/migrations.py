"""What 0.1.0 froze, as this version reads it. When a setting or a class moves, add a row."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lockstep_gpt.catalog import extra_of_choice, how_to_add
from lockstep_gpt.config_files import target_of
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.model_settings import ModelConfig

_CORE = "lockstep_gpt"
_EXTRAS = "lockstep_gpt.extras"
_LOGGERS = "lockstep_gpt.run.loggers"
# Classes, by the beginning of their `_target_`; the first row that fits counts.
MOVED_TARGETS = {
    f"{_CORE}.run.tracking.wandb_logger": f"{_LOGGERS}.wandb_run.WandbRun",
    f"{_CORE}.runtime.tracking.wandb_logger": f"{_LOGGERS}.wandb_run.WandbRun",
    f"{_CORE}.training.tracking.wandb_logger": f"{_LOGGERS}.wandb_run.WandbRun",
    f"{_CORE}.training.tracking.": f"{_LOGGERS}.tensorboard_files.",
    f"{_EXTRAS}.trackers.event_files.": f"{_LOGGERS}.tensorboard_files.",
    f"{_EXTRAS}.trackers.mlflow_runs.mlflow_logger": f"{_LOGGERS}.mlflow_runs.MLflowRun",
    f"{_CORE}.runtime.": f"{_CORE}.run.",
    f"{_CORE}.training.callbacks.sample.": f"{_CORE}.run.callbacks.progress.",
    f"{_CORE}.training.callbacks.": f"{_CORE}.run.callbacks.",
    f"{_CORE}.training.ranks.": f"{_CORE}.distributed.strategies.",
    f"{_CORE}.training.sharding.": f"{_CORE}.distributed.strategies.",
    f"{_CORE}.training.strategies.": f"{_CORE}.distributed.strategies.",
    f"{_CORE}.training.strategy.": f"{_CORE}.distributed.strategies.",
    f"{_EXTRAS}.sharding.fsdp2.": f"{_CORE}.distributed.strategies.",
    f"{_EXTRAS}.datasets.packing.": f"{_EXTRAS}.datasets.whole_documents.",
    f"{_CORE}.seeing.": f"{_EXTRAS}.pages.",
    f"{_EXTRAS}.seeing.": f"{_EXTRAS}.pages.",
}
MOVED_SETTINGS = {
    "launch.warm": "warm.enabled",
    "model.mask_documents": "documents.mask",
}
# Settings without a successor: null, which did nothing, is left out; a value is refused.
GONE_SETTINGS = ("model.lora_alpha", "model.lora_rank")
# Callbacks that a setting, `pages.report`, has replaced.
GONE_CALLBACKS = (f"{_CORE}.seeing.at_end.ReportAtEnd", f"{_EXTRAS}.seeing.at_end.ReportAtEnd")


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """Return the frozen configuration of any version as this version would have frozen it."""
    values = _without_gone_callbacks(values)
    values = _with_moved_targets(values)
    values = _with_moved_settings(values)
    values = _without_unset_settings(values)
    data = values.get("data")
    if not isinstance(data, dict) or "source" not in data:
        return values
    migrated = {**values, "data": _with_target(data)}
    if "packing" in data:
        migrated["packing"] = {"_target_": _class_of("packing", data["packing"])}
    return migrated


def _without_gone_callbacks(values: dict[str, Any]) -> dict[str, Any]:
    callbacks = values.get("callbacks")
    if not isinstance(callbacks, dict):
        return values
    remaining = {
        name: node
        for name, node in callbacks.items()
        if not (isinstance(node, dict) and node.get("_target_") in GONE_CALLBACKS)
    }
    return {**values, "callbacks": remaining}


def _with_moved_targets(node: Any) -> Any:
    """Return nested containers with the new names of classes."""
    if isinstance(node, list):
        return [_with_moved_targets(item) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {name: _with_moved_targets(value) for name, value in node.items()}
    target = moved.get("_target_")
    if isinstance(target, str):
        moved["_target_"] = place_of(target)
    return moved


def place_of(target: str) -> str:
    """Return the name of a class now, from its name in any version."""
    for old, new in MOVED_TARGETS.items():
        if target.startswith(old):
            return new + target.removeprefix(old)
    return target


def _with_moved_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with settings in their new groups; those that were off are left out."""
    moved = dict(values)
    for setting in GONE_SETTINGS:
        group, _, name = setting.partition(".")
        if isinstance(moved.get(group), dict) and moved[group].get(name, "") is None:
            moved[group] = {key: value for key, value in moved[group].items() if key != name}
    for old, new in MOVED_SETTINGS.items():
        group, _, name = old.partition(".")
        if not isinstance(moved.get(group), dict) or name not in moved[group]:
            continue
        moved[group] = {key: value for key, value in moved[group].items() if key != name}
        value = values[group][name]
        if value is None or value is False:
            continue
        new_group, _, new_name = new.partition(".")
        moved[new_group] = {**moved.get(new_group, {}), new_name: value}
    return moved


def _without_unset_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out settings of the model that this version lacks and that were null: they did nothing.

    Any other setting that it lacks is an error, when the values are read.
    """
    model = values.get("model")
    if not isinstance(model, dict):
        return values
    known = {item.name for item in fields(ModelConfig)}
    kept = {name: value for name, value in model.items() if value is not None or name in known}
    return {**values, "model": kept}


def _with_target(data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a source, which named itself by `source`, with its class."""
    # `num_workers` needs no successor: loader processes gave the same batches in the same order.
    removed = ("source", "packing", "num_workers")
    settings = {name: value for name, value in data.items() if name not in removed}
    sources = settings.get("sources")
    if isinstance(sources, dict):
        settings["sources"] = {name: _with_target(source) for name, source in sources.items()}
    return {"_target_": _class_of("data", data["source"]), **settings}


def _class_of(group: str, choice: str) -> str:
    """Return the class of a source or a packing, which had the name of its preset until 0.1.0.

    Raises:
        UserError: it belongs to an extra that this checkout lacks.
    """
    target = target_of(group, choice)
    if target is None:
        extra = extra_of_choice(group, choice)
        if extra:
            remedy = how_to_add(extra)
        else:
            remedy = f"a file {choice}.yaml in configs/{group}/"
        raise UserError(f"this run has {group}={choice}, which needs {remedy}")
    return target
