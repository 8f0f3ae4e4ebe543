"""What becomes of the states in memory when a command ends: they stay only after a kill."""

from dataclasses import replace
from typing import Any

from lockstep.exits import Ending, Exit
from lockstep.memory.files import (
    KeptState,
    SharedMemoryError,
    identity_of,
    remove_states,
    states_in,
)
from lockstep.memory.held_states import held_by
from lockstep.run.directory import RunDirectory


def state_left(run: RunDirectory) -> KeptState | None:
    """Return the newest state of `run` in this machine's memory; its bytes aren't verified.

    Of shards, the machine has as many of it as of any state.
    """
    identity = identity_of(run)
    if identity is None or _has_failed(run):  # after an exception, they are removed
        return None
    try:
        states = states_in(identity)
    except (OSError, SharedMemoryError):
        return None
    by_state: dict[Any, list[KeptState]] = {}
    for state in states:
        key = held_by(state).state if state.header.part else state.path
        by_state.setdefault(key, []).append(state)
    most = max(map(len, by_state.values()), default=0)
    for parts in by_state.values():  # the newest first
        if len(parts) == most:
            return replace(parts[0], parts=tuple(parts) if most > 1 else ())
    return None


def _has_failed(run: RunDirectory) -> bool:
    """Return whether training has failed; a mistake, which ends a resume before it, is none."""
    return run.failed.exists() and run.read_failure().get("status") != Exit.MISTAKE


def release_memory(run: RunDirectory, status: int) -> None:
    """Remove the states of a run that has ended with `status`, unless it continues from them.

    That is after a kill, after a stop that was too late for a save, and after a mistake in the
    command that was to continue.
    """
    identity = identity_of(run)
    if identity is None:
        return
    is_unsaved = status in (Exit.FAILED, Exit.LOST_PEERS, Exit.MISTAKE)
    if Ending(status).stopped_by:
        is_unsaved = not run.read_summary().get("saved")
    if not is_unsaved or state_left(run) is None:
        remove_states(identity)
