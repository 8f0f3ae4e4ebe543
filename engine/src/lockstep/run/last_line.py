"""The last line of a run that ends early: the cause, what is saved, and the way on.

No other output follows it. A rank only records its failure, in `failed.json`; once all ranks of a
machine have ended, their agent prints the line, or without an agent, the command. If the agent
itself dies, the command prints it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from lockstep.checkpoints.reading import checkpoints_in, newest_valid, step_of
from lockstep.checkpoints.sums import files_of
from lockstep.damaged_files import absence_of
from lockstep.errors import ReportedError, RunError, UserError, describe_error
from lockstep.exits import Exit
from lockstep.memory.ending import state_left
from lockstep.processes import program_name, training_command
from lockstep.run.directory import RunDirectory
from lockstep.settings import node_of
from lockstep.whole_files import replace_text

# Above this size, a checkpoint counts as intact because it is complete: verifying it would delay
# the line by more than some seconds, and a resume verifies it anyway.
VERIFIED_BYTES = 1 << 33
LONGEST_ERROR = 10_000  # characters, in `failed.json`

_is_left_to_agent = False  # whether an agent prints the last line of this process
_unrecorded: dict[str, Any] = {}  # this rank's failure, if the run's disk is full


@contextlib.contextmanager
def left_to_agent() -> Iterator[None]:
    """Let this rank's agent print the last line meanwhile."""
    global _is_left_to_agent
    _is_left_to_agent = True
    try:
        yield
    finally:
        _is_left_to_agent = False


def way_on(run: RunDirectory, node_rank: int = 0) -> str:
    """Return what is saved, and the command that continues `run` from this folder."""
    command = f"{_on_other_machines(run)}: {resume_command(run, node_rank)}"
    if not run.config.is_file():
        return f"restore {run.config}, then continue{command}"
    try:
        kept = state_left(run)
        saved = max(map(step_of, checkpoints_in(run.checkpoints)), default=0)
        if kept is not None and kept.step > saved:
            size = f"{kept.size / 1e6:,.1f} MB"
            return f"step {kept.step} stays in this machine's memory ({size}); to continue{command}"
        newest = _newest_saved(run.checkpoints)
        if newest is not None:
            return f"step {step_of(newest)} is saved; to continue{command}"
        if not checkpoints_in(run.checkpoints):
            if run.has_saved():  # a resume refuses to start over
                folder = run.checkpoints
                return f"{folder} {absence_of(folder)}; restore it, then continue{command}"
            return f"nothing is saved; to start over{command}"
        return f"no checkpoint in {run.checkpoints} is intact; restore one, then continue{command}"
    except UserError as fault:
        return f"{fault}; to continue{command}"
    except OSError as error:
        return f"{run.checkpoints} cannot be read ({error.strerror}); to continue{command}"


def resume_command(run: RunDirectory, node_rank: int = 0) -> str:
    """Return what to type in this folder to continue `run` on machine `node_rank`."""
    words = [training_command(), shlex.quote(f"run_dir={run.path}"), "resume=auto"]
    if node_rank:
        words.append(f"launch.node_rank={node_rank}")
    return " ".join(words)


def _on_other_machines(run: RunDirectory) -> str:
    """Return where else the command must run, as the end of a phrase."""
    nodes = 1
    with contextlib.suppress(OSError, UserError):
        nodes = node_of(run.values(), "trainer").get("num_nodes", 1)
    if nodes > 1:
        return " on all machines, each with its launch.node_rank"
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != os.environ.get("LOCAL_WORLD_SIZE", world_size):
        return " through the launcher, on all machines"
    return ""


def _newest_saved(folder: Path) -> Path | None:
    """Return the newest intact checkpoint; None if there is none."""
    present = checkpoints_in(folder)
    if not present:
        return None
    size = sum(file.stat().st_size for file in files_of(present[-1]) if file.exists())
    if size > VERIFIED_BYTES:
        return present[-1]
    return newest_valid(folder)


def show(run: RunDirectory, cause: str, node_rank: int = 0, terminal: TextIO | None = None) -> None:
    """Print the last line, and write it to the run's log."""
    write(run, f"{cause}; {way_on(run, node_rank)}", terminal)


def write(run: RunDirectory, text: str, terminal: TextIO | None = None) -> None:
    """Print `text`, and append it to the run's log; a full disk or a closed terminal is ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=terminal or sys.stderr, flush=True)
    append(run.log, text)


def append(log: Path, text: str) -> None:
    """Append lines to a log, if the disk allows it."""
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def show_error(run: RunDirectory, error: BaseException, node_rank: int = 0) -> None:
    """Print the last line of an exception that ends the run while it is handled."""
    if not isinstance(error, RunError | UserError):
        write(run, traceback.format_exc())
    show(run, f"{program_name()}: {describe_error(error)}", node_rank)


def record(
    run: RunDirectory, rank: int, status: Exit, error: BaseException | str, line: str
) -> bool:
    """Record a rank's failure and its line in `failed.json`; return whether it is the first."""
    summary = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
    failure = {"rank": rank, "status": status, "error": shortened(summary), "line": line}
    is_first = run.record_failure(failure)
    if is_first and not recorded(run):
        _hand_over(failure)
    return is_first


def shortened(text: str) -> str:
    """Return a text without its middle if it is long, as what a compiler prints; logs have all."""
    left_out = len(text) - LONGEST_ERROR
    if left_out <= 0:
        return text
    half = LONGEST_ERROR // 2
    return f"{text[:half]}\n[{left_out:,} characters]\n{text[-half:]}"


def _hand_over(failure: dict[str, Any]) -> None:
    """Keep a failure that the run's full disk did not take, also for torch's agent."""
    global _unrecorded
    _unrecorded = failure
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the folder for temporary files
    if not path:
        return
    text = json.dumps({**failure, "message": failure["line"], "timestamp": int(time.time())})
    with contextlib.suppress(OSError):
        replace_text(Path(path), text)  # torch takes no half a file


def recorded(run: RunDirectory) -> dict[str, Any]:
    """Return `failed.json`; empty if no failure could be recorded."""
    try:
        return run.read_failure()
    except (OSError, ValueError):  # half a file, on a full disk
        return {}


def show_recorded(
    run: RunDirectory,
    node_rank: int = 0,
    handed_over: Iterable[dict[str, Any]] = (),
    terminal: TextIO | None = None,
) -> int | None:
    """Print the last line of the run's failure; return its status, None without one.

    Args:
        run: may have a `failed.json`.
        node_rank: the number of this machine.
        handed_over: failures that did not fit on its disk.
        terminal: where to print; None: the standard error output.
    """
    failure = next(filter(None, [recorded(run), *handed_over]), None)
    if failure is None:
        return None
    line = str(failure.get("line", failure["error"]))
    status = int(failure["status"])
    if status == Exit.MISTAKE:  # its line says what to do
        write(run, line, terminal)
    else:
        show(run, line, node_rank, terminal)
    return status


def show_end_of_rank(run: RunDirectory, rank: int, status: int, terminal: TextIO) -> None:
    """Print the last line of a failed rank without an agent, unless another rank's tells more."""
    global _unrecorded
    if _is_left_to_agent or status not in (Exit.FAILED, Exit.MISTAKE, Exit.LOST_PEERS):
        return
    failure = recorded(run) or _unrecorded
    _unrecorded = {}  # this process may go on to another run
    if not failure and status == Exit.LOST_PEERS:
        cause = f"rank {rank} lost other ranks; their output says why"
        show(run, cause, terminal=terminal)
    elif not failure:
        cause = f"rank {rank} ended with status {status}, for the reason above"
        show(run, cause, terminal=terminal)
    elif failure["rank"] == rank:
        show_recorded(run, handed_over=[failure], terminal=terminal)


def fail_early(run: RunDirectory, rank: int, error: BaseException) -> int:
    """Record an exception before a rank could set itself up; return its exit status."""
    if not isinstance(error, RunError | UserError):
        traceback.print_exc()
    line = f"rank {rank} failed: {describe_error(error)}"
    record(run, rank, Exit.FAILED, error, line)
    return Exit.FAILED


def reported(run: RunDirectory, error: Exception) -> ReportedError:
    """Print the last line of an exception in the command; return what ends the command."""
    show_error(run, error)
    return ReportedError(getattr(error, "status", Exit.FAILED))
