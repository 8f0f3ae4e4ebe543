"""Run as a rank of a launcher: meet the other ranks, agree with them on one run, and train."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import DistBackendError

from lockstep_gpt.config import PROGRAM, Config, RunError, UserError
from lockstep_gpt.launch import start
from lockstep_gpt.processes import LOST_PEERS, end_process
from lockstep_gpt.registry import asked
from lockstep_gpt.run_directory import RunDirectory, differences
from lockstep_gpt.runtime import ranks
from lockstep_gpt.training import train


def join(
    values: dict[str, Any],
    config: Config,
    create: Callable[[], RunDirectory],
    undo: Callable[[], None],
) -> int:
    """Run as a rank of the launcher that started this process; return the exit status.

    Raises:
        RunError: the ranks do not meet.
    """
    try:
        ranks.join(ranks.Ranks.from_environment(), config)
    except DistBackendError as error:
        told = asked("EXPLAIN_ERROR", str(error), config, ranks.Ranks.from_environment().world_size)
        line = f"the launcher's ranks cannot connect ({'; '.join(str(error).splitlines())})"
        raise RunError("\n".join([line, *filter(None, told)])) from None
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for errors of its store
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RunError(  # not necessarily a mistake: another try may succeed
            f"the launcher's ranks cannot meet at {place} ({str(error).splitlines()[0]}); start "
            "all of them, with a free MASTER_PORT on a machine that all can reach"
        ) from None
    run = agree(values, create, undo)
    if isinstance(run, int):
        return run
    start.prepared(run.load())  # on each machine
    status = train.main(run)
    if status in (1, LOST_PEERS):  # a normal exit waits for ranks that may be gone
        end_process(status)
    return status


def agree(
    values: dict[str, Any], create: Callable[[], RunDirectory], undo: Callable[[], None]
) -> RunDirectory | int:
    """Agree with the other ranks of an outer launcher on one run directory.

    Every process has composed the configuration by itself, so the ranks compare: rank 0's counts,
    and a rank with a different one is named. Only rank 0 calls `create`, and `undo` if they do not
    agree. Rank 0 then reports the error for all ranks, and every rank returns the exit status.
    """
    first = ranks.Ranks.from_environment().rank == 0
    run: dict[str, Any] = {"fault": "", "values": {}, "status": 2}
    if first:
        try:
            made = create()  # at its current path: it may have moved since it was frozen
            run |= {"values": made.values(), "path": str(made.path)}
        except (UserError, RunError) as error:
            run |= {"fault": str(error), "status": error.status}
    run = ranks.from_rank_zero(run)
    faults = [run["fault"]] if run["fault"] else []
    differing = differences(run["values"], values) if not faults else []
    for number, text in enumerate(ranks.from_each_rank(", ".join(differing))):
        if text:
            faults.append(f"rank {number} has a different configuration than rank 0: {text}")
    if not faults:
        return RunDirectory(Path(run["path"]))
    if first and run["values"]:
        undo()
    if first:
        print(f"{PROGRAM} train: {faults[0]}", file=sys.stderr)
    ranks.leave()
    return int(run["status"])


def refuse_other_directory(directory: RunDirectory) -> None:
    """Compare the frozen files that the ranks have read: a folder may only look shared."""
    hashes = ranks.from_each_rank(directory.hash())
    others = [str(rank) for rank, content in enumerate(hashes) if content != hashes[0]]
    if others:
        raise UserError(
            f"run_dir={directory.path} of rank {', '.join(others)} is not rank 0's folder; "
            "name one that all nodes share"
        )
