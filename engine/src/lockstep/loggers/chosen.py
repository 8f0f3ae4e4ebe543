"""The loggers that a configuration chooses, guarded so that they can't end a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger

from lockstep import project
from lockstep.building import build, imported
from lockstep.loggers.tracker_guard import TrackerGuard
from lockstep.loggers.tracking import ContinuedRun, TrackedRun, git_state
from lockstep.processes import limit_exit
from lockstep.run.directory import RunDirectory

SECONDS = 30.0  # for a call of a tracker, such as wandb, until the run goes on without it


def chosen_loggers(
    directory: RunDirectory,
    nodes: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    seconds: float = SECONDS,
) -> list[Logger]:
    """Build the chosen loggers, each with a time limit for its calls.

    Each gets those of these arguments that its class has, unless they are set: ours, the run's
    directory and configuration; Lightning's, the run's folder and name, and the id to continue.

    Args:
        directory: the run.
        nodes: a name -> what names the logger's class; null: none.
        config: of the run, as plain values.
        facts: derived values, such as the rate; loggers get them beside the configuration.
        seconds: that a call may take.

    Raises:
        UserError: a setting of a logger is wrong.
    """
    chosen = {name: node for name, node in (nodes or {}).items() if node is not None}
    if chosen:
        limit_exit(seconds)
    values = {**config, **facts, **git_state(project.folder())}
    values["run_name"] = config.get("run_name") or directory.path.name
    offered: dict[str, Any] = {
        "directory": directory,
        "config": values,
        "save_dir": str(directory.path),
        "run_name": values["run_name"],
    }
    loggers = []
    for name, node in chosen.items():
        guard = TrackerGuard(name, seconds, directory)
        kind = imported(node.get("_target_", ""), f"logger.{name}")
        continued = ContinuedRun(directory, name, kind)
        given = {**offered, "guard": guard, "run_id": continued.run_id}
        named = inspect.signature(kind).parameters
        unset = {key: value for key, value in given.items() if key in named and key not in node}
        logger = guard.start(kind, partial(build, node, **unset))
        if not isinstance(logger, TrackedRun) and continued.run_id is None:
            logger.log_hyperparams(values)  # a tracked run got them at its start
            guard.call("start", continued.remember, logger)
        loggers.append(logger)
    return loggers
