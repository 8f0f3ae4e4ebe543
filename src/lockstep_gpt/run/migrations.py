"""What earlier versions froze, as this version reads it. Add a line when a setting changes."""

from __future__ import annotations

from typing import Any

from lockstep_gpt.config import UserError, target_of


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """Return a frozen configuration of an earlier version as this version would have frozen it."""
    data = values.get("data")
    if not isinstance(data, dict) or "source" not in data:
        return values
    migrated = {**values, "data": _with_target(data)}
    if "packing" in data:
        migrated["packing"] = {"_target_": _class_of("packing", data["packing"])}
    return migrated


def _with_target(data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a source, which named itself by `source`, with its class."""
    # Loader processes gave the same batches in the same order.
    gone = ("source", "packing", "num_workers")
    kept = {name: value for name, value in data.items() if name not in gone}
    if isinstance(kept.get("sources"), dict):
        kept["sources"] = {name: _with_target(own) for name, own in kept["sources"].items()}
    return {"_target_": _class_of("data", data["source"]), **kept}


def _class_of(group: str, choice: str) -> str:
    """Return the class of a source or a packing, which had the name of its preset until 0.1.0.

    Raises:
        UserError: it is an extra's, which is not here.
    """
    target = target_of(group, choice)
    if target is None:
        raise UserError(
            f"this run has {group}={choice}, which no file in configs/{group}/ provides; add the "
            "extra that does, with python3 scripts/dev.py update --extras NAMES"
        )
    return target
