"""What a failed rank leaves: the stack in its log, `failed.json`, and an exit status."""

import traceback
from typing import TextIO

from lockstep.errors import RunError, UserError, describe_error, remedy_of_limit
from lockstep.exits import Exit
from lockstep.processes import program_name
from lockstep.ranks.ranks import Ranks, lost_peers
from lockstep.run import last_line, remedies
from lockstep.run.directory import RunDirectory


def report_failure(
    directory: RunDirectory,
    ranks: Ranks,
    error: BaseException,
    terminal: TextIO,
) -> int:
    """Record the failure of this rank while its exception is handled; return the exit status.

    All ranks write the stack to their logs, with an explanation if the error is a known one. The
    first one shows it on the terminal, too. Mistakes and events need no stack, but a line, which
    `last_line` shows at the end.
    """
    if isinstance(error, UserError):
        line = f"{program_name()}: {error}"
        return _record(directory, ranks, Exit.MISTAKE, error, line, "", terminal)
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # Lightning has replaced it
    stack = traceback.format_exc()
    cause = remedies.explain(stack)
    text = f"{cause}\n\n{stack}" if cause else stack
    last_line.append(directory.log_of(ranks.rank), text)
    if lost_peers(error) and not remedy_of_limit(error):
        return Exit.LOST_PEERS
    what = describe_error(error)
    if cause and not isinstance(error, RunError):  # what torch says about it has many lines
        what = f"{type(error).__name__}: {remedies.in_one_line(cause)}"
    line = f"rank {ranks.rank} failed: {what}"
    if isinstance(error, RunError):
        text = ""
    return _record(directory, ranks, Exit.FAILED, error, line, text, terminal)


def _record(
    directory: RunDirectory,
    ranks: Ranks,
    status: Exit,
    error: BaseException,
    line: str,
    stack: str,
    terminal: TextIO,
) -> int:
    """Record the failure; if it is the run's first, print `stack`, and return `status`."""
    is_first = last_line.record(directory, ranks.rank, status, error, line)
    if is_first and stack:
        print(stack, file=terminal, flush=True)
    return status
