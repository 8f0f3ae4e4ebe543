"""How a run ends: `summary.json`, and the last lines on the terminal."""

import math
import shlex
import time
from typing import Any

from lightning import Trainer

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.processes import invocation
from lockstep_gpt.run.callbacks.checkpoints import Checkpoints
from lockstep_gpt.run.callbacks.step import InSummary
from lockstep_gpt.run.checkpoint_sums import VerifiedCheckpoint
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.last_line import evaluate_command
from lockstep_gpt.run.loggers.tracking import WANDB_ID, read_id, tracked_runs


def refuse_finished(config: Config, checkpoint: VerifiedCheckpoint) -> None:
    """Raise a `UserError` if a new run has nothing to train after `checkpoint`."""
    steps = config.max_steps
    if checkpoint.step < steps:
        return
    path = checkpoint.path
    longer = steps * (checkpoint.step // steps + 1)
    new = ""
    if config.trains_gpt:
        new = f"for a new run with its weights, set resume=none model.init_from={path}; "
    raise UserError(
        f"resume={path} is after step {checkpoint.step}, but this run ends after step {steps}; to "
        f"train it longer, set max_steps={longer}; {new}to evaluate it: {evaluate_command(path)}"
    )


def status_of(trainer: Trainer) -> str:
    """Return the status of a run that reached its last step or was stopped by a callback.

    `trainer.max_epochs` and `trainer.fast_dev_run` let the last epoch end it, too.
    """
    last = trainer.max_epochs
    has_ended = last is not None and 0 <= last <= trainer.current_epoch
    if trainer.global_step == trainer.max_steps or has_ended:
        return "done"
    return "stopped early"


def summary_of_callbacks(trainer: Any) -> dict[str, Any]:
    """Return what callbacks add to a run's summary."""
    entries: dict[str, Any] = {}
    for callback in trainer.callbacks:
        if isinstance(callback, InSummary):
            entries |= callback.in_summary(trainer.global_step)
    return entries


def write_summary(
    directory: RunDirectory, status: str, trainer: Trainer, more: dict[str, Any]
) -> None:
    """Write `summary.json`: how the run ended, what callbacks add, and `more`."""
    summary = {
        "status": status,
        "step": trainer.global_step,
        "wandb_run_id": read_id(directory.wandb_id, WANDB_ID),
    }
    directory.write_summary({**summary, **summary_of_callbacks(trainer), **more})


def _monitored_result(callbacks: list[Any]) -> str:
    """Return the last and the best value of the monitored metric; empty without a validation."""
    saving = next((item for item in callbacks if isinstance(item, Checkpoints)), None)
    if saving is None or math.isnan(saving.newest_value):
        return ""
    best = saving.in_summary(0)["best_value"]
    text = f"{saving.monitor} {saving.newest_value:.4f}"
    return text if best is None else f"{text}, at best {best:.4f}"


def last_lines(
    directory: RunDirectory,
    trainer: Trainer,
    row: dict[str, float],
    started: float,
    prompt: str | None,
) -> str:
    """Return how a run ended, where its files are, and what is next.

    Args:
        directory: the run.
        trainer: has trained.
        row: the newest value of each metric.
        started: the clock when it began.
        prompt: to continue; empty: none is known; None: another module than the GPT was trained.
    """
    status = status_of(trainer)
    if status != "done":
        status += f", after step {trainer.global_step:,} of {trainer.max_steps:,},"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    result = _monitored_result(callbacks) or "no validation"
    if "val/perplexity" in row:
        perplexity = f"perplexity {row['val/perplexity']:.2f}"
        result = f"validation loss {row['val/loss']:.4f} nats per token, {perplexity}"
    # Lightning's EarlyStopping has one.
    reasons = [getattr(callback, "stopping_reason_message", "") for callback in callbacks]
    reason = "".join(f"\n  reason       {text}" for text in reasons if text)
    run_dir = shlex.quote(str(directory.path))
    commands = [evaluate_command(directory.path)]
    if prompt is not None:
        words = f" --prompt {shlex.quote(prompt)}" if prompt else ""
        commands.insert(0, f"{invocation()} generate {run_dir}{words}")
    for run in tracked_runs(trainer.loggers):
        commands += run.next_commands() or []  # None from a tracker that failed
    next_commands = "\n".join(f"  {command}" for command in commands)
    return f"""
{status} in {time.perf_counter() - started:.0f} s: {result}{reason}
  metrics      {directory.metrics}
  checkpoints  {directory.checkpoints}
next
{next_commands}"""
