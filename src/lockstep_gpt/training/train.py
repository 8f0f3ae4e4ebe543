"""What one rank does, from top to bottom: assemble, announce, fit, conclude."""

import contextlib
import logging
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep_gpt import PROGRAM
from lockstep_gpt.config import Config
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.distributed import flight_recorder, ranks
from lockstep_gpt.distributed.ranks import Ranks
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.exits import Exit, after_signal
from lockstep_gpt.model.functional import choose_matrix_products
from lockstep_gpt.processes import invocation
from lockstep_gpt.run import remedies
from lockstep_gpt.run.callbacks.metrics import COLUMNS, Metrics, peak_tflops
from lockstep_gpt.run.callbacks.stopping import GracefulStop, Stopped
from lockstep_gpt.run.checkpoint import step_of
from lockstep_gpt.run.checkpoint_writing import checkpoint_io
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracking import tracked_runs
from lockstep_gpt.run.metrics_file import MetricsFile
from lockstep_gpt.run.resuming import refuse_other_directory, state_to_resume
from lockstep_gpt.training import reporting
from lockstep_gpt.training.advice import advise, attention
from lockstep_gpt.training.batches import build_data, epochs_of, tokenizer_of
from lockstep_gpt.training.building import (
    build_checkpoints,
    build_guards,
    build_loggers,
    build_trainer,
)
from lockstep_gpt.training.initial_weights import load_initial_weights
from lockstep_gpt.training.module import GPTModule
from lockstep_gpt.training.schedule import BatchPlan, plan_batch, plan_schedule

logger = logging.getLogger(__name__)

TESTED = ("test/loss", "test/perplexity")


@dataclass
class Training:
    """The parts of one rank's training, in the order in which `assemble` makes them."""

    directory: RunDirectory
    rank: int
    kernels: str  # what computes matrix products
    batch: BatchPlan
    data: LightningDataModule
    module: GPTModule  # has the configuration, the schedule, and the tokenizer
    resume: str | None  # the checkpoint to continue from; None: step 0
    metrics: Metrics
    metrics_file: MetricsFile
    loggers: list[Logger]  # those that the user chose; only rank 0 has some
    trainer: Trainer


def main(directory: RunDirectory, store: Store | None = None) -> int:
    """Train as one rank, and return its exit status.

    Args:
        directory: the run, whose configuration is frozen.
        store: where the ranks of a launcher have met; None: they meet now, or there is only one.
    """
    config = directory.load()
    here = Ranks.from_environment()
    with reporting.reporting(directory, here, config) as terminal, _same_precision_afterward():
        training = None
        try:
            started = time.perf_counter()
            training = assemble(directory, config, here, terminal, store)
            if here.rank == 0:
                announce(training)
            fit(training, started)
        except Stopped as stopped:
            resume = f"{invocation()} train run_dir={directory.path} resume=auto"
            logger.info("%s after saving; to continue it:\n  %s", stopped, resume)
            return after_signal(stopped.signum)
        except Exception as error:
            model = training.module.model if training else None
            return _fail(directory, config, here, error, terminal, model)
    reporting.drop_rank_log(directory, here)
    return Exit.DONE


def assemble(
    directory: RunDirectory,
    config: Config,
    here: Ranks,
    terminal: TextIO,
    store: Store | None,
) -> Training:
    """Make everything that a run needs, from the ranks' connection to the Trainer."""
    kernels = connect(directory, config, here, store)
    torch.manual_seed(config.seed)

    batch = plan_batch(config.batch, config.model.block_size, here.local_world_size, here.num_nodes)
    schedule = plan_schedule(config, batch)
    data = build_data(config, batch)
    module = GPTModule(config, schedule, tokenizer_of(data))

    disk = checkpoint_io(directory, config)
    refuse_other_directory(directory)
    resume = load_weights(directory, config, module)

    metrics = measure(config, batch, module)
    metrics_file = MetricsFile(directory.metrics, COLUMNS)
    checkpoints = build_checkpoints(directory, module)
    guards = build_guards(directory, config, here.rank, terminal)
    loggers = build_loggers(directory, batch, module) if here.rank == 0 else []
    trainer = build_trainer(
        config,
        here,
        batch,
        first=[metrics],
        last=[*guards, GracefulStop(checkpoints), checkpoints],
        loggers=[metrics_file, *loggers],
        plugins=[disk],
        default_root_dir=directory.path,
        max_steps=schedule.total_steps,
        use_distributed_sampler=not isinstance(data, TokenDataModule),
    )
    return Training(
        directory,
        here.rank,
        kernels,
        batch,
        data,
        module,
        resume,
        metrics,
        metrics_file,
        loggers,
        trainer,
    )


def load_weights(directory: RunDirectory, config: Config, module: GPTModule) -> str | None:
    """Return the checkpoint to continue from; without one, load the initial weights, if any."""
    resume = state_to_resume(directory, config, module)
    if resume is None and config.resume in ("none", "auto"):
        load_initial_weights(module.model, module.tokenizer)
    return resume


def measure(config: Config, batch: BatchPlan, module: GPTModule) -> Metrics:
    """Return the callback that measures the run, also against the peak of the devices."""
    flops = module.model.flops_per_token
    peak = peak_tflops(config, batch.world_size)
    return Metrics(config.log_every, batch.tokens_per_step, flops, peak)


def connect(directory: RunDirectory, config: Config, here: Ranks, store: Store | None) -> str:
    """Meet the other ranks, which also selects this rank's GPU; return what computes products."""
    flight_recorder.record_collectives(ranks.backend_of(config), directory.rank_logs)
    ranks.join(here, config, store)
    return choose_matrix_products(config.trainer["accelerator"])


def announce(training: Training) -> None:
    """Print the receipt, and warn of settings that will not have the intended effect."""
    config = training.module.config
    schedule = training.module.schedule
    samples = schedule.total_steps * training.batch.global_size
    epochs = epochs_of(training.data, samples)
    advise(config, epochs)
    facts = reporting.facts(
        config, training.module.model, training.data, training.trainer, training.kernels
    )
    details = {"attention": attention(config), **reporting.details(training.trainer)}
    receipt = reporting.receipt(config, training.batch, schedule, epochs, facts, details)
    logger.info("%s", reporting.as_text(receipt))
    reporting.warn_of_sudden_rate(schedule)


def fit(training: Training, started: float) -> None:
    """Train to the end, test if that is set, and conclude the run, however it ends.

    Args:
        training: the rank's parts.
        started: the clock when this rank began.
    """
    if training.rank == 0:
        step = step_of(Path(training.resume)) if training.resume else 0
        training.metrics.continue_from(training.metrics_file.truncate_after(step))
    status = "failed"
    try:
        status = _fit(training)
        if training.module.config.test and status == "done":
            training.metrics.row |= _test(training)
    except Stopped:
        status = "stopped"
        raise
    finally:
        if training.rank == 0:
            conclude(training, status, time.perf_counter() - started)
    ranks.leave()
    if training.rank == 0:
        row = training.metrics.row
        logger.info("%s", reporting.closing(training.directory, training.trainer, row, started))


def _fit(training: Training) -> str:
    """Train to the end and finish all writes; return the run's status."""
    trainer = training.trainer
    disk: Any = trainer.strategy.checkpoint_io
    try:
        trainer.fit(training.module, training.data, ckpt_path=training.resume)
    finally:
        disk.wait()
    return reporting.ending(trainer)


def _test(training: Training) -> dict[str, float]:
    """Test the trained model, on all ranks; return the metrics, which every logger gets."""
    trainer = training.trainer
    trainer.test(training.module, training.data, verbose=False)
    metrics = {name: float(trainer.callback_metrics[name]) for name in TESTED}
    for each in trainer.loggers:
        if not isinstance(each, MetricsFile):  # its columns are those of training
            each.log_metrics(metrics, trainer.global_step)
    return metrics


def conclude(training: Training, status: str, seconds: float) -> None:
    """Write `summary.json`, and end the runs of trackers."""
    facts: dict[str, float] = {
        "lr": training.module.schedule.peak_lr,
        "wall_seconds": seconds,
        "world_size": training.batch.world_size,
        "global_batch_size": training.batch.global_size,
    }
    row = training.metrics.row
    if "test/loss" in row:
        facts["test_loss"] = row["test/loss"]
    directory = training.directory
    # After a failure, a disk that cannot be written is no second one.
    guarded = contextlib.suppress(OSError) if status == "failed" else directory.writing()
    with guarded:
        reporting.conclude(directory, status, training.trainer, facts)
    for run in tracked_runs(training.loggers):
        run.close(status)


@contextlib.contextmanager
def _same_precision_afterward() -> Iterator[None]:
    """Restore what torch computes float32 products with, for a caller that goes on."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _fail(
    directory: RunDirectory,
    config: Config,
    here: Ranks,
    error: Exception,
    terminal: TextIO,
    model: torch.nn.Module | None,
) -> int:
    """Record a failure, and return the exit status; print the run's first one, log the others."""
    if isinstance(error, UserError):
        shown = f"{PROGRAM} train: {error}"
        status = Exit.MISTAKE
    else:
        text = traceback.format_exc()
        cause = remedies.explain_error(text, config, here.world_size, model)
        trace = "\n\n".join(filter(None, [cause, text]))
        path = directory.rank_log(here.rank) if here.rank else directory.log
        with contextlib.suppress(OSError), path.open("a") as log:
            log.write(trace)
        if ranks.lost_peers(error):
            return Exit.LOST_PEERS
        before = "" if isinstance(error, RunError) else f"{trace}\n"
        shown = f"{before}rank {here.rank} failed: {error}"
        status = Exit.FAILED
    said = f"{type(error).__name__}: {error}"
    if directory.record_failure({"rank": here.rank, "status": status, "error": said}):
        print(shown, file=terminal, flush=True)
    return status
