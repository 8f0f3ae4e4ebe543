"""Lets functions of a run note when they are entered and left; Python imports it at its start.

It replaces the functions in `PLACES` once their modules are imported, in processes for which
`NOTED_PLACES` is set.
"""

import importlib.machinery
import os
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from noted import note

PLACES = {
    "lockstep.launch.agent": ["RankAgent._end_others", "RankAgent._start_workers"],
    "lockstep.launch.rank_program": ["run_rank"],
    "lockstep.launch.rank": ["call"],
    "lockstep.run.run": ["Run.join", "Run.loggers", "Run.announce", "Run.checkpoint"],
    "lockstep_gpt.data": ["Tokens.__init__"],
    "lockstep_gpt.module": ["GPTModule.__init__", "GPTModule.training_step"],
    "lockstep.checkpoints.io": ["AtomicCheckpointIO.load_checkpoint"],
    "lockstep.callbacks.step": ["StepCallback.on_train_start"],
}
noted: set[tuple[int, str]] = set()


def note_once(event: str) -> None:
    """Write a line at the first event of its kind in a rank, and at each of an agent."""
    key = (os.getpid(), event)
    if key not in noted or "RANK" not in os.environ:
        noted.add(key)
        note(event)


def noting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls `function` between two notes."""

    @wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        note_once(f">{name}")
        try:
            return function(*positional, **named)
        finally:
            note_once(f"<{name}")

    return call


class Finder:
    """Finds the modules in `PLACES`, and replaces their functions when they are executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG004
        """Return a module's specification, as a finder of `sys.meta_path` does."""
        if name not in PLACES:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            for place in PLACES[name]:
                owner, _, attribute = place.rpartition(".")
                holder = getattr(module, owner) if owner else module
                event = owner if attribute == "__init__" else attribute
                setattr(holder, attribute, noting(getattr(holder, attribute), event))

        spec.loader.exec_module = execute_and_replace
        return spec


if "NOTED_PLACES" in os.environ:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
