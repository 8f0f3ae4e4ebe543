"""What a failed rank leaves: lines in its log and on the terminal, `failed.json`, a status."""

import contextlib
import traceback
from typing import TextIO

from torch import nn

from lockstep_gpt import PROGRAM
from lockstep_gpt.config import Config
from lockstep_gpt.distributed.ranks import Ranks, lost_peers
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.exits import Exit
from lockstep_gpt.run import remedies
from lockstep_gpt.run.directory import RunDirectory


def report_failure(
    directory: RunDirectory,
    config: Config,
    ranks: Ranks,
    error: Exception,
    terminal: TextIO,
    model: nn.Module | None,
) -> int:
    """Record the failure of this rank while its exception is handled; return the exit status.

    The run's first failure goes to the terminal. A user's mistake is one line there; of others,
    all ranks write the stack to their logs, with an explanation if the error is a known one.
    """
    if isinstance(error, UserError):
        return _record(directory, ranks, Exit.MISTAKE, error, f"{PROGRAM} train: {error}", terminal)
    stack = traceback.format_exc()
    cause = remedies.explain_error(stack, config, ranks.world_size, model)
    text = f"{cause}\n\n{stack}" if cause else stack
    path = directory.log if ranks.rank == 0 else directory.rank_log(ranks.rank)
    with contextlib.suppress(OSError), path.open("a") as log:
        log.write(text)
    if lost_peers(error):
        return Exit.LOST_PEERS
    line = f"rank {ranks.rank} failed: {error}"
    if not isinstance(error, RunError):
        line = f"{text}\n{line}"
    return _record(directory, ranks, Exit.FAILED, error, line, terminal)


def _record(
    directory: RunDirectory,
    ranks: Ranks,
    status: Exit,
    error: Exception,
    line: str,
    terminal: TextIO,
) -> int:
    """Write `failed.json`, and print `line` if this is the run's first failure."""
    summary = f"{type(error).__name__}: {error}"
    is_first = directory.record_failure({"rank": ranks.rank, "status": status, "error": summary})
    if is_first:
        print(line, file=terminal, flush=True)
    return status
