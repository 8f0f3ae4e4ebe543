"""What a run resumes from: which checkpoint, whether it fits the run, and what changes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from lockstep.checkpoints import reading as files
from lockstep.checkpoints.content import (
    NEEDED_TO_RESUME,
    refuse_broken_weights,
    shards_of,
)
from lockstep.checkpoints.room import (
    refuse_full_disk,
    refuse_large_file,
    size_of,
)
from lockstep.checkpoints.sums import VerifiedCheckpoint
from lockstep.damaged_files import absence_of, refuse_misplaced
from lockstep.errors import UserError
from lockstep.memory.files import KeptState, identity_of, remove_states
from lockstep.memory.recovery import newest_in_memory, newest_whole_step
from lockstep.memory.shard_recovery import newest_shards
from lockstep.memory.writer import MemoryWriter
from lockstep.ranks.ranks import (
    LONGEST_WAIT,
    Ranks,
    from_each_rank,
    from_rank_zero,
    is_rank_zero,
    ranks_unlike_rank_zero,
)
from lockstep.run.directory import RunDirectory, some_of
from lockstep.settings import counted

logger = logging.getLogger(__name__)

# Raises a `UserError` if the settings of a checkpoint, whose place it is told, don't fit the run.
CompareSettings = Callable[[str, dict[str, Any]], None]
TAKE_ANOTHER = "move it to another folder, and resume=auto takes the one before it"


def state_to_resume(
    directory: RunDirectory,
    resume: str = "auto",
    *,
    compare: CompareSettings | None = None,
    in_memory: bool = True,
    writer: MemoryWriter | None = None,
    fetch_copy: Callable[[], VerifiedCheckpoint | None] = lambda: None,
    loses_error: bool = False,
    timeout: float = LONGEST_WAIT,
) -> VerifiedCheckpoint | KeptState | None:
    """Return what to resume from: the run's own newest state, else the checkpoint `resume` names.

    None means step 0. Every rank must call this: rank 0 searches and tells the others.

    Args:
        directory: the run.
        resume: none, auto, or where a checkpoint is: for a run that has none of its own.
        compare: refuses settings of another run; None: it may have others.
        in_memory: whether a state in memory may be taken.
        writer: of the machine, on the rank that has it.
        fetch_copy: fetches the newest copy for a run that lost its checkpoints, if there is one.
        loses_error: whether the strategy accumulates an error that no state has, as powersgd does.
        timeout: the longest wait for another rank in seconds.
    """
    kept = _newest_in_memory(directory, writer, timeout, may_take=in_memory)
    if kept is not None:
        _refuse_lost_error(kept.path, loses_error)
        _refuse_misplaced(directory, kept)
        return kept
    newest = None
    if Ranks.from_environment().rank == 0:
        newest = _newest_of_run(directory, resume, fetch_copy)
    newest = verified_on_each_machine(newest)
    if newest is None and resume in ("none", "auto"):
        _tell_start(directory)
        return None
    checkpoint = newest or _named(resume, directory)
    if newest is not None:
        _refuse_lost_error(newest.path, loses_error)
    elif compare is not None:
        saved = files.read_verified(checkpoint, whole=False)["config"]
        compare(f"resume={checkpoint.path}", saved)
    _tell_checkpoint(checkpoint)
    return checkpoint


def _refuse_misplaced(directory: RunDirectory, kept: KeptState) -> None:
    """Raise a `UserError` if the next save would fail, and the state in memory would be lost."""
    try:
        refuse_misplaced(directory.checkpoints)
    except UserError as error:
        raise UserError(f"{error}; step {kept.step} stays in this machine's memory") from error


def _tell_checkpoint(checkpoint: VerifiedCheckpoint) -> None:
    if Ranks.from_environment().rank == 0:
        logger.info("continues from step %d, %s", checkpoint.step, checkpoint.path)


def _tell_start(directory: RunDirectory) -> None:
    if Ranks.from_environment().rank == 0 and directory.has_begun():
        logger.info("starts at step 0: no state of the run is saved, and none is in memory")


def _named(resume: str, directory: RunDirectory) -> VerifiedCheckpoint:
    """Return the checkpoint that `resume` names, or that run's newest."""
    named = None
    if Ranks.from_environment().rank == 0:
        named = files.find_verified(Path(resume), directory.path / "artifacts")
    checkpoint = verified_on_each_machine(named)
    assert checkpoint is not None
    return checkpoint


def _newest_in_memory(
    directory: RunDirectory, writer: MemoryWriter | None, timeout: float, *, may_take: bool
) -> KeptState | None:
    """Return the newest state in memory, if no checkpoint is newer; none is read for this.

    Every rank must call this. If none may be taken, all are removed.
    """
    identity = identity_of(directory)
    if identity is None:
        return None
    if not may_take:
        if Ranks.from_environment().local_rank == 0:
            remove_states(identity)  # the run leaves them behind
        return None
    saved = 0
    fault = None
    if is_rank_zero():
        try:
            saved = max(map(files.step_of, files.checkpoints_in(directory.checkpoints)), default=0)
        except UserError as error:
            fault = error
    shards = writer.shards if writer else None
    at_least = max(saved, newest_whole_step(identity))
    kept = newest_shards(identity, Ranks.from_environment(), shards, at_least)
    if kept is None:
        kept = newest_in_memory(identity, writer, saved, timeout)
    if kept is None:
        return None
    if is_rank_zero():
        _tell_recovery(directory, kept, fault)
    return kept


def _tell_recovery(directory: RunDirectory, kept: KeptState, fault: UserError | None) -> None:
    if fault is None:
        files.remove_leftovers(directory.checkpoints)
    else:
        logger.warning("%s; not needed now: the state is in memory", fault)
    logger.info("continues from step %d, kept in memory", kept.step)


def verified_on_each_machine(checkpoint: VerifiedCheckpoint | None) -> VerifiedCheckpoint | None:
    """Return rank 0's checkpoint, as verified by a rank of this machine; every rank must call this.

    So each machine reads it all only once: rank 0 has already done so, and on other machines, the
    first rank does it now. Every rank then finds the files that one of these has read.

    Raises:
        UserError: this machine has other files.
    """
    first: VerifiedCheckpoint | None = from_rank_zero(checkpoint)
    if first is None:
        return None
    ranks = Ranks.from_environment()
    verified = None
    if ranks.rank == 0:
        verified = first
    elif ranks.local_rank == 0:
        verified = files.verify_named(first.path)
        if verified.sums != first.sums:
            raise UserError(
                f"checkpoint {first.path} of rank {ranks.rank} is not rank 0's; name a folder "
                "that all nodes share"
            )
    candidates: list[VerifiedCheckpoint] = [*filter(None, from_each_rank(verified))]
    seen_here = next((found for found in candidates if found.is_unchanged()), first)
    seen_here.refuse_change()
    return seen_here


def refuse_other_directory(directory: RunDirectory) -> None:
    """Compare the frozen files that the ranks have read: a folder may only look shared."""
    others = ranks_unlike_rank_zero(directory.hash())
    if others:
        raise UserError(
            f"run_dir={directory.path} of rank {others} is not rank 0's folder; "
            "name one that all nodes share"
        )


def _newest_of_run(
    directory: RunDirectory, resume: str, fetch_copy: Callable[[], VerifiedCheckpoint | None]
) -> VerifiedCheckpoint | None:
    """Return the newest intact checkpoint; set newer ones aside, clean up after a kill."""
    folder = directory.checkpoints
    refuse_misplaced(folder)
    files.remove_leftovers(folder)
    newest = files.newest_verified(folder, NEEDED_TO_RESUME)
    present = files.checkpoints_in(folder)
    if newest is None and (resume == "auto" or directory.metrics.exists()):
        newest = fetch_copy()
    if newest is None and present:
        raise UserError(
            f"{folder} has {counted(len(present), 'checkpoint')}, but none is valid; "
            "put a valid copy of one there, or start a new run"
        )
    if newest is None and directory.has_saved():
        raise UserError(
            f"run_dir={directory.path} has saved checkpoints, but {folder} "
            f"{absence_of(folder)}; mount or restore it, or start over in another run_dir, "
            "with resume=CHECKPOINT from a copy of one"
        )
    if newest is not None:
        directory.note_save()  # an earlier version didn't
    for path in present:
        if newest and files.step_of(path) > files.step_of(newest.path):
            files.set_aside(path)
    return newest


def refuse_small_disk(folder: Path, module: torch.nn.Module, saves_parts: bool) -> None:
    """Raise an error if no checkpoint of this module fits the disk, or the limit of a file."""
    weights = size_of(module.state_dict())
    refuse_full_disk(folder, 3 * weights)  # AdamW: two moments each
    if not saves_parts:
        refuse_large_file(weights)  # other optimizers have no moments


def _refuse_lost_error(path: Path, loses_error: bool) -> None:
    """Raise a `UserError` for a run that would resume without its accumulated error."""
    if loses_error:
        raise UserError(f"{path} lacks powersgd's accumulated error; resume_force=true resets it")


def fitting_of(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of `saved` that have the name and shape of one in `current`."""
    shapes = {name: weight.shape for name, weight in current.items()}
    return {name: weight for name, weight in saved.items() if shapes.get(name) == weight.shape}


def refuse_lost_parts(where: str, checkpoint: dict[str, Any]) -> None:
    """Raise a `UserError` if the checkpoint `where` lacks what a run resumes from."""
    missing = [name for name in NEEDED_TO_RESUME if name not in checkpoint]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; {TAKE_ANOTHER}")


def refuse_lost_numbers(where: str, saved: dict[str, Any], module: torch.nn.Module) -> None:
    """Raise a `UserError` if weights of the checkpoint `where` are not finite; buffers may be.

    Every rank must call this: rank 0 reads them, and tells the others.
    """
    fault = None
    if is_rank_zero():
        names = [name for name, _ in module.named_parameters() if name in saved]
        shards = ((name, shard) for name in names for shard in shards_of(saved[name]))
        try:
            refuse_broken_weights(shards, where, TAKE_ANOTHER)
        except UserError as error:
            fault = str(error)
    fault = from_rank_zero(fault)
    if fault is not None:
        raise UserError(fault)


class RefuseUnfit:
    """Refuses a checkpoint of a run with other settings or code, before anything is restored.

    It is called by what reads checkpoints.

    Args:
        compare: refuses other settings; None: any may differ.
        module: has whole weights: no ranks share them yet.
    """

    def __init__(self, compare: CompareSettings | None, module: torch.nn.Module) -> None:
        self.compare = compare
        self._module = module
        # Names of weights -> tensors of their whole shapes.
        self._places = {name: weight.to("meta") for name, weight in module.state_dict().items()}

    def __call__(self, where: str, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if the checkpoint `where` doesn't fit; every rank must call this."""
        refuse_lost_parts(where, checkpoint)
        if self.compare is not None:
            self.compare(where, checkpoint["config"])
        # Also those that `configure_model` has made since.
        made_later = self._module.state_dict()
        refuse_other_weights(where, checkpoint["state_dict"], {**made_later, **self._places})
        refuse_lost_numbers(where, checkpoint["state_dict"], self._module)


def refuse_other_weights(where: str, saved: dict[str, Any], places: dict[str, Any]) -> None:
    """Raise a `UserError` unless all saved weights of the checkpoint `where` fit all `places`."""
    fitting = fitting_of(saved, places)
    if len(fitting) < len(saved) or len(fitting) < len(places):
        absent = sorted(places.keys() - fitting.keys())
        more = f"; it lacks {some_of(absent)}" if len(fitting) == len(saved) else ""
        raise UserError(
            f"{where}: only {len(fitting)} of its {len(saved)} weights fit this model's "
            f"{len(places)}{more}; use the model and the code that wrote it"
        )


def align_batch_progress(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Let Lightning's counts of micro-batches be those of whole steps of this run.

    With other ranks, a step has another number of micro-batches of each: without this, the run
    would continue in the middle of a step. Between two epochs, none is done; Lightning would set
    that only after the checkpoint.

    Args:
        checkpoint: of a run with any number of micro-batches in a step; changed in place.
        trainer: of this run.
    """
    loops = checkpoint["loops"]["fit_loop"]
    # Not the `current` ones: where a run continues with an epoch's start, one of them stays behind.
    epochs = loops["epoch_progress"]["total"]
    is_within = epochs["ready"] == epochs["started"] > epochs["completed"]
    if not is_within:
        progress = loops["epoch_loop.batch_progress"]
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False
        return
    before = checkpoint.get("accumulate_grad_batches")
    now = trainer.accumulate_grad_batches
    progress = loops["epoch_loop.batch_progress"]
    batches = progress["current"]["ready"]
    if before is None or before == now or batches % before:
        return
    shift = batches // before * now - batches
    for scope in ("total", "current"):
        progress[scope] = {name: count + shift for name, count in progress[scope].items()}
