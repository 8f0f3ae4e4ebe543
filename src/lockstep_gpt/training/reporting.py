"""What a rank prints, such as the receipt, and where: rank 0 to the terminal and train.log."""

import contextlib
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from lightning import LightningDataModule, Trainer
from torch import nn
from tqdm import tqdm

from lockstep_gpt.config import LEVELS, Config
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.packing import packing_of
from lockstep_gpt.distributed.exact_sizes import sums_line
from lockstep_gpt.distributed.ranks import Ranks, backend_here
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.processes import invocation
from lockstep_gpt.run.callbacks.step import InReceipt, InSummary
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracking import tracked_runs
from lockstep_gpt.settings import counted
from lockstep_gpt.training.schedule import BatchPlan, Schedule

logger = logging.getLogger(__name__)

# The base class of all BatchNorm layers: torch has no public one.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
# Lightning prints these. They are true, but don't help a reader of our receipt.
NOISE = [
    r".*does not have many workers which may be a bottleneck.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*The `srun` command is available on your system but is not used.*",
    r".*You're resuming from a checkpoint that ended before the epoch ended.*",
]
LIBRARIES = ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "fsspec")
ASKED = ("lightning.pytorch.callbacks", "lightning.pytorch.profilers")  # for their output


class AboveBar(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines above a progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; ignore a full disk or closed pipe: logging must not end a run."""
        with contextlib.suppress(OSError):
            tqdm.write(self.format(record), file=self.stream)
            self.flush()  # a file or a pipe would only get it at the end of the run


@contextlib.contextmanager
def reporting(run: RunDirectory, ranks: Ranks, config: Config) -> Iterator[TextIO]:
    """Set up logging and warnings while a rank runs; yield the terminal, for failures."""
    terminal = _terminal(run, ranks)
    handlers = [AboveBar(sys.stdout)]
    with contextlib.ExitStack() as after, warnings.catch_warnings():
        if ranks.rank == 0:  # unbuffered: closing it can't fail on a full disk
            log = after.enter_context(run.log.open("ab", buffering=0))
            handlers.append(AboveBar(io.TextIOWrapper(log, "utf-8", write_through=True)))
        for handler in handlers:
            handler.setFormatter(logging.Formatter("%(message)s"))
            after.callback(handler.close)
        for name in ("", *LIBRARIES, *ASKED):  # libraries log through our handlers
            library = logging.getLogger(name)
            before = {"handlers": library.handlers, "propagate": library.propagate}
            after.callback(vars(library).update, before)
            after.callback(library.setLevel, library.level)
            vars(library).update(handlers=[], propagate=True)
            if config.verbosity != "debug":
                library.setLevel(logging.INFO if name in ASKED else logging.WARNING)
        logging.root.handlers = [*handlers]
        logging.root.setLevel(LEVELS[config.verbosity])
        after.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}"
        logging.captureWarnings(True)
        after.callback(logging.captureWarnings, False)
        for pattern in NOISE:
            warnings.filterwarnings("ignore", pattern)
        yield terminal


def _terminal(run: RunDirectory, ranks: Ranks) -> TextIO:
    """Return the terminal; redirect rank N > 0's output, also of C++ libraries, to its file."""
    if ranks.rank == 0:
        return sys.stderr
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8")
    path = run.rank_log(ranks.rank)
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return terminal


def drop_rank_log(run: RunDirectory, ranks: Ranks) -> None:
    """Remove the file of a rank that succeeded."""
    if ranks.rank:
        run.rank_log(ranks.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are still in the folder
            run.rank_log(ranks.rank).parent.rmdir()


RULES = {"linear": "linear in the batch", "sqrt": "square root of the batch", "none": "not scaled"}


def receipt(
    config: Config,
    batch: BatchPlan,
    schedule: Schedule,
    epochs: float | None,
    facts: dict[str, str],
    details: dict[str, str],
) -> dict[str, str]:
    """Return label -> line, including the rank's `facts` and the `details` of callbacks."""

    def steps(count: int) -> str:
        return f"{counted(count, 'step')} = {counted(count * batch.tokens_per_step, 'token')}"

    decay = ", then constant"
    if config.optim.decay != "constant":
        final = schedule.lr(schedule.total_steps - 1)
        last = f"over the last {steps(schedule.decay_steps)} to {final:g}"
        decay = f", {config.optim.decay} decay {last}"
    found = f"{counted(batch.global_size, 'sample')}, tuned for {config.batch.reference_size}"
    return {
        "run": f"{config.run_name} in {config.run_dir}",
        **facts,
        "precision": config.precision + (", compiled" if config.compile else ""),
        "batch": f"{counted(batch.devices, 'device')} x {counted(batch.nodes, 'node')} x "
        f"{counted(batch.micro_size, 'sample')} x {batch.accumulation} accumulation = "
        f"{counted(batch.global_size, 'sample')} = "
        f"{batch.tokens_per_step:,} tokens per step",
        "sums": sums_line(config, batch.global_size, batch.micro_size, batch.accumulation),
        **details,
        "budget": steps(schedule.total_steps) + _in_epochs(epochs),
        "lr": f"{schedule.base_lr:g} x {schedule.scale:g} = {schedule.peak_lr:g} "
        f"({RULES[config.optim.lr_scaling]}: {found})",
        "schedule": f"{steps(schedule.warmup_steps)} of warmup{decay}",
    }


HIGH_SCALE = 4  # times the tuned rate; without warmup, it often diverges (Goyal et al. 2017)


def warn_of_sudden_rate(schedule: Schedule) -> None:
    """Warn if the first update already has a rate far above the one that was tuned."""
    if schedule.warmup_steps == 0 and schedule.scale >= HIGH_SCALE:
        logger.warning(
            "the first step has %g times the tuned learning rate, because the batch is larger, and "
            "there is no warmup: set optim.warmup_steps, optim.lr_scaling=none, or a fixed "
            "batch.global_size",
            schedule.scale,
        )


def _in_epochs(epochs: float | None) -> str:
    """Return the length of a run in epochs; empty if the data module doesn't say."""
    if epochs is None:
        return ""
    count = times(epochs)
    return f" = {count} epoch{'s' * (count != '1')}"


def times(epochs: float) -> str:
    """Return the number of epochs to two digits, or whole from 100 on."""
    return f"{epochs:,.0f}" if epochs >= 99.5 else f"{epochs:.2g}"


def facts(
    config: Config, model: GPT, data: LightningDataModule, trainer: Trainer, products: str
) -> dict[str, str]:
    """Return the lines of the receipt that only the running rank knows."""
    group = f" over {backend_here()}" if trainer.world_size > 1 else ""
    return {
        "model": f"{model.num_parameters:,} parameters, vocabulary of {model.vocab_size:,} "
        f"tokens, context of {config.model.block_size}",
        **data_lines(config, data),
        "devices": f"{trainer.world_size} x {config.trainer['accelerator']}, "
        f"{counted(torch.get_num_threads(), 'thread')} each",
        "kernels": f"matrix products by {products}",
        "strategy": type(trainer.strategy).__name__ + group,
        **batchnorm_line(config, model),
    }


def data_lines(config: Config, data: LightningDataModule) -> dict[str, str]:
    """Return the receipt's lines on the data and the windows."""
    if not isinstance(data, TokenDataModule):
        own = f"{type(data).__name__}, a data module of your own: order, resume, and equal results "
        return {"data": own + "on any number of devices are up to it"}
    line = f"{data.folder}, {data.train_windows:,} windows to train on, "
    lines = {"data": f"{line}{data.val_windows:,} to validate on"}
    packing = packing_of(config.packing._target_).describe(data.folder, data.block_size)
    return {**lines, "packing": packing} if packing else lines


def batchnorm_line(config: Config, model: nn.Module) -> dict[str, str]:
    """Return the receipt's line on SyncBatchNorm; empty if it is not set."""
    if not config.trainer.get("sync_batchnorm"):
        return {}
    count = sum(isinstance(module, BatchNorm) for module in model.modules())
    if count == 0:
        return {"batchnorm": "trainer.sync_batchnorm=true changes nothing: the model has none"}
    return {"batchnorm": f"{counted(count, 'layer')} synchronized over all ranks"}


def as_text(lines: dict[str, str]) -> str:
    """Lay the receipt out in two columns."""
    width = max(map(len, lines))
    return "\n".join(f"  {label:<{width}}  {line}" for label, line in lines.items())


def found(trainer: Any) -> dict[str, Any]:
    """Return what callbacks add to a run's summary."""
    entries: dict[str, Any] = {}
    for callback in trainer.callbacks:
        if isinstance(callback, InSummary):
            entries |= callback.in_summary(trainer.global_step)
    return entries


def details(trainer: Any) -> dict[str, str]:
    """Return what callbacks add to a run's receipt."""
    lines: dict[str, str] = {}
    for callback in trainer.callbacks:
        if isinstance(callback, InReceipt):
            lines |= callback.receipt_lines()
    return lines


def conclude(directory: RunDirectory, status: str, trainer: Trainer, more: dict[str, Any]) -> None:
    """Write `summary.json`: how the run ended, what callbacks add, and `more`."""
    run = {"status": status, "saved": status != "failed", "step": trainer.global_step}
    wandb_id = directory.wandb_id.read_text() if directory.wandb_id.exists() else None
    directory.write_summary({**run, "wandb_run_id": wandb_id, **found(trainer), **more})


def ending(trainer: Trainer) -> str:
    """Return the status of a run that reached its last step or was stopped by a callback."""
    return "done" if trainer.global_step == trainer.max_steps else "stopped early"


def closing(
    directory: RunDirectory, trainer: Trainer, row: dict[str, float], started: float
) -> str:
    """Return how the run that began at `started` ended, where its files are, and what is next."""
    ended, found = ending(trainer), "no validation"
    if "val/loss" in row:
        perplexity = f"perplexity {row['val/perplexity']:.2f}"
        found = f"validation loss {row['val/loss']:.4f} nats per token, {perplexity}"
    if "test/loss" in row:
        found += f", test loss {row['test/loss']:.4f}"
    if ended != "done":
        ended += f", after step {trainer.global_step:,} of {trainer.max_steps:,},"
    commands = [command for run in tracked_runs(trainer.loggers) for command in run.next_commands()]
    shown = "".join(f"\n  {command}" for command in commands)
    return f"""
{ended} in {time.perf_counter() - started:.0f} s: {found}
  metrics      {directory.metrics}
  checkpoints  {directory.checkpoints}
next
  {invocation()} generate {directory.path} --prompt "def "
  {invocation()} evaluate {directory.path}{shown}"""
