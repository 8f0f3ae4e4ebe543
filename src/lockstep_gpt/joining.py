"""Started by a launcher that is there already, torchrun for one: this process becomes a rank.

Every process has composed the configuration for itself, so the ranks compare: what rank 0 has
counts, and a rank that has something else is named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep_gpt.config import PROGRAM, Config, UserError
from lockstep_gpt.run_directory import RunDirectory

# What rank 0 decides for all; the others may have guessed it differently.
DECIDED_BY_RANK_ZERO = ("run_dir", "run_name")


def join_run(
    values: dict[str, Any],
    config: Config,
    create: Callable[[], RunDirectory],
    undo: Callable[[], None],
) -> int:
    """Agree with the other ranks on one run directory, then train; return the exit status.

    Args:
        values: the configuration as this rank would freeze it.
        config: the same, typed.
        create: makes the run directory; called on rank 0 alone.
        undo: unmakes it, if the ranks do not agree.

    Raises:
        UserError: on rank 0 for all of them, whose mistake it may ever have been.
    """
    from lockstep_gpt.training import ranks as group
    from lockstep_gpt.training import train as rank

    ranks = group.Ranks.from_environment()
    group.join(ranks, config)
    run = _created(create) if ranks.rank == 0 else {}
    run = json.loads(group.from_rank_zero(json.dumps(run)))
    faults = [run["fault"]] if run["fault"] else []
    differences = _differences(run["values"], values) if not faults else []
    for number, text in enumerate(group.from_each_rank(", ".join(differences))):
        if text:
            faults.append(f"rank {number} has another configuration than rank 0: {text}")
    if not faults:
        return rank.main(RunDirectory(Path(run["values"]["run_dir"])))
    if ranks.rank == 0 and run["values"]:
        undo()
    if ranks.rank == 0:
        print(f"{PROGRAM} train: {faults[0]}", file=sys.stderr)
    group.leave()
    return 2


def _created(create: Callable[[], RunDirectory]) -> dict[str, Any]:
    try:
        return {"fault": None, "values": create().values()}
    except UserError as error:
        return {"fault": str(error), "values": {}}


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name the settings in which two frozen configurations differ, with both values."""
    left, right = dict(_flat(theirs)), dict(_flat(json.loads(json.dumps(ours))))
    return [
        f"{name}={right.get(name)} instead of {left.get(name)}"
        for name in sorted({*left, *right} - set(DECIDED_BY_RANK_ZERO))
        if left.get(name) != right.get(name)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
