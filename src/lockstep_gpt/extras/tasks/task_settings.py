"""Checks the callback's settings and files before ranks start."""

from __future__ import annotations

from typing import Any

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.builtin import held_out
from lockstep_gpt.extras.tasks.examples import BUILTIN, read_tasks
from lockstep_gpt.settings import as_typed

TARGET = "lockstep_gpt.extras.tasks.during.Tasks"


def refuse_bad_tasks(config: Config) -> None:
    """Raise a `UserError` for settings or files that the callback in `config` can't use."""
    for name, node in config.callbacks.items():
        if isinstance(node, dict) and node.get("_target_") == TARGET:
            files = node.get("files", [BUILTIN])
            check_settings(f"callbacks.{name}", node.get("every", 1), node.get("share"), files)
            read_tasks(files)
            if BUILTIN in files:
                held_out(config)


def check_settings(name: str, every: Any, share: Any, files: Any) -> None:
    """Raise a `UserError` for a value that the callback `name` can't use."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UserError(f"{name}.every={as_typed(every)} must be a whole number of at least 1")
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if share is not None and not (number and 0 < share <= 1):
        rule = "must be above 0 and at most 1, or null for no limit"
        raise UserError(f"{name}.share={as_typed(share)} {rule}")
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise UserError(f"{name}.files={as_typed(files)} must be a list; for example [{BUILTIN}]")
