"""What one rank does: assemble, fit, report."""

import contextlib
import logging
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning import Callback, LightningDataModule, Trainer
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep_gpt import PROGRAM
from lockstep_gpt.config import Config
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.distributed import flight_recorder
from lockstep_gpt.distributed import ranks as meeting
from lockstep_gpt.distributed.cluster_environment import RanksEnvironment
from lockstep_gpt.distributed.exact_sums import gradient_sums
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.exits import Exit, after_signal
from lockstep_gpt.model.functional import choose_matrix_products
from lockstep_gpt.processes import invocation
from lockstep_gpt.registry import CALLBACKS, additions
from lockstep_gpt.run import remedies
from lockstep_gpt.run.callbacks import metrics as measuring
from lockstep_gpt.run.callbacks.checkpoints import Checkpoints
from lockstep_gpt.run.callbacks.guards import Guards
from lockstep_gpt.run.callbacks.stopping import GracefulStop, Stopped
from lockstep_gpt.run.callbacks.time_limit import SaysTimeIsUp, has_time_limit
from lockstep_gpt.run.callbacks.weight_hashes import WeightHashes
from lockstep_gpt.run.checkpoint import step_of
from lockstep_gpt.run.checkpoint_writing import checkpoint_io
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers import tracking
from lockstep_gpt.run.metrics_file import MetricsFile
from lockstep_gpt.run.resuming import refuse_other_directory, state_to_resume
from lockstep_gpt.training import reporting
from lockstep_gpt.training import schedule as planning
from lockstep_gpt.training.advice import advise, attention
from lockstep_gpt.training.apple_gpu import AppleGPU
from lockstep_gpt.training.batches import build_data, epochs_of, tokenizer_of
from lockstep_gpt.training.building import build, deferred, mistake
from lockstep_gpt.training.counted_targets import CountedTargets
from lockstep_gpt.training.initial_weights import load_initial_weights
from lockstep_gpt.training.module import GPTModule

logger = logging.getLogger(__name__)

TESTED = ("test/loss", "test/perplexity")


def main(directory: RunDirectory, store: Store | None = None) -> int:
    """Train as one rank, and return its exit status.

    Args:
        directory: the run, whose configuration is frozen.
        store: where the ranks of a launcher have met; None: they meet now, or there is only one.
    """
    config, ranks = directory.load(), meeting.Ranks.from_environment()
    with reporting.reporting(directory, ranks, config) as terminal, contextlib.ExitStack() as after:
        after.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        try:
            _train(directory, config, ranks, terminal, store)
        except Stopped as stopped:
            go_on = f"{invocation()} train run_dir={directory.path} resume=auto"
            logger.info("%s after saving; to continue it:\n  %s", stopped, go_on)
            return after_signal(stopped.signum)
        except Exception as error:
            return _fail(directory, config, ranks, error, terminal)
    reporting.drop_rank_log(directory, ranks)
    return Exit.DONE


def _train(
    directory: RunDirectory,
    config: Config,
    ranks: meeting.Ranks,
    terminal: TextIO,
    store: Store | None,
) -> None:
    """Assemble everything, from the batch to the Trainer, then fit."""
    started = time.perf_counter()
    flight_recorder.record_collectives(meeting.backend_of(config), directory.rank_logs)
    meeting.join(ranks, config, store)  # before anything else: it also selects this rank's GPU
    products = choose_matrix_products(config.trainer["accelerator"])
    torch.manual_seed(config.seed)
    batch = planning.plan_batch(
        config.batch, config.model.block_size, ranks.local_world_size, ranks.num_nodes
    )
    schedule = planning.plan_schedule(config, batch)
    data = build_data(config, batch)
    tokenizer = tokenizer_of(data)
    module = GPTModule(config, schedule, tokenizer)
    flops, peak = module.model.flops_per_token, measuring.peak_tflops(config, batch.world_size)
    metrics = measuring.Metrics(config.log_every, batch.tokens_per_step, flops, peak)
    content = {"config": directory.values(), "tokenizer": tokenizer.to_dict()}
    checkpoints = Checkpoints(directory.checkpoints, config, content, schedule.total_steps)
    disk = checkpoint_io(directory, config)
    refuse_other_directory(directory)
    resume = state_to_resume(directory, config, module)
    if not resume and config.resume in ("none", "auto"):
        load_initial_weights(module.model, module.tokenizer)
    loggers = _loggers(directory, batch, module) if ranks.rank == 0 else []
    metrics_file = MetricsFile(directory.metrics, measuring.COLUMNS)
    guards = _guards(directory, config, ranks, terminal)
    trainer = _trainer(
        config,
        ranks,
        callbacks=[metrics, *guards, GracefulStop(checkpoints), checkpoints],
        logger=[metrics_file, *loggers],
        plugins=[disk],
        default_root_dir=directory.path,
        max_steps=schedule.total_steps,
        accumulate_grad_batches=batch.accumulation,
        val_check_interval=config.val_every * batch.accumulation,
        use_distributed_sampler=not isinstance(data, TokenDataModule),
    )
    if ranks.rank == 0:
        epochs = epochs_of(data, schedule.total_steps * batch.global_size)
        advise(config, epochs)
        facts = reporting.facts(config, module.model, data, trainer, products)
        details = {"attention": attention(config), **reporting.details(trainer)}
        receipt = reporting.receipt(config, batch, schedule, epochs, facts, details)
        logger.info("%s", reporting.as_text(receipt))
        reporting.warn_of_sudden_rate(schedule)
        earlier = metrics_file.begin(step_of(Path(resume)) if resume else 0)
        metrics.row = {name: float(earlier[name]) for name in measuring.COLUMNS if name in earlier}
    status = "failed"
    try:
        status = _fit(trainer, module, data, resume)
        if config.test and status == "done":
            metrics.row |= _test(trainer, module, data)
    except Stopped:
        status = "stopped"
        raise
    finally:
        if ranks.rank == 0:
            totals: dict[str, float] = {
                "lr": schedule.peak_lr,
                "wall_seconds": time.perf_counter() - started,
                "world_size": batch.world_size,
                "global_batch_size": batch.global_size,
            }
            _conclude(directory, status, trainer, totals, metrics.row)
            for each in tracking.tracked_runs(loggers):
                each.close(status)
    meeting.leave()
    if ranks.rank == 0:
        logger.info("%s", reporting.closing(directory, trainer, metrics.row, started))


def _conclude(
    directory: RunDirectory,
    status: str,
    trainer: Trainer,
    facts: dict[str, float],
    row: dict[str, float],
) -> None:
    """Write `summary.json`; after a failure, a disk that cannot be written is no second one."""
    if "test/loss" in row:
        facts["test_loss"] = row["test/loss"]
    with contextlib.suppress(OSError) if status == "failed" else directory.writing():
        reporting.conclude(directory, status, trainer, facts)


def _guards(
    directory: RunDirectory, config: Config, ranks: meeting.Ranks, terminal: TextIO
) -> list[Callback]:
    """Return the callbacks that keep the weights right, or that extras add."""
    guards: list[Callback] = []
    for make_callbacks in additions(CALLBACKS):
        guards += make_callbacks(config, directory, ranks.rank, terminal)
    if has_time_limit(config):
        guards.append(SaysTimeIsUp())
    guards += gradient_sums(config)
    guards.append(CountedTargets(config))
    guards.append(WeightHashes())
    guards.append(Guards(config, directory, ranks.rank, terminal))
    if config.trainer["accelerator"] == "mps":
        guards.append(AppleGPU())
    return guards


def _fit(trainer: Trainer, module: GPTModule, data: LightningDataModule, resume: str | None) -> str:
    """Train to the end and finish all writes; return the run's status."""
    disk: Any = trainer.strategy.checkpoint_io
    try:
        trainer.fit(module, data, ckpt_path=resume)
    except RuntimeError as error:
        vars(error)["model"] = module.model  # its parameters without a gradient explain it
        raise
    finally:
        disk.wait()
    return reporting.ending(trainer)


def _test(trainer: Trainer, module: GPTModule, data: LightningDataModule) -> dict[str, float]:
    """Test the trained model, on all ranks; return the metrics, which every logger gets."""
    trainer.test(module, data, verbose=False)
    metrics = {name: float(trainer.callback_metrics[name]) for name in TESTED}
    for each in trainer.loggers:
        if not isinstance(each, MetricsFile):  # its columns are those of training
            each.log_metrics(metrics, trainer.global_step)
    return metrics


def _loggers(directory: RunDirectory, batch: planning.BatchPlan, module: GPTModule) -> list[Logger]:
    """Build the loggers other than metrics.csv; ours get the run and its derived values."""
    derived = {
        "world_size": batch.world_size,
        "global_batch_size": batch.global_size,
        "tokens_per_step": batch.tokens_per_step,
        "scaled_lr": module.schedule.peak_lr,
        "parameters": module.model.num_parameters,
        **tracking.git_state(Path(__file__).parent),
    }
    shown = {**directory.values(), **derived}
    known = {"directory": directory, "config": shown, "model": module.model}
    loggers = [build(node, known) for node in module.config.logger.values()]
    for each in loggers:
        if not isinstance(each, tracking.TrackedRun):  # which got them at its start
            each.log_hyperparams(shown)
    return loggers


def _trainer(
    config: Config, ranks: meeting.Ranks, callbacks: list[Any], **arguments: Any
) -> Trainer:
    """Build the Trainer; the parts it always needs are not in groups that a user replaces."""
    known = {"accelerator": config.trainer["accelerator"], "world_size": ranks.world_size}
    try:
        metrics, *ours = callbacks  # the user's go in between: they see the metrics
        chosen = [build(node, {}) for node in config.callbacks.values()]
        places = {"devices": ranks.local_world_size, "num_nodes": ranks.num_nodes}
        make = deferred({**config.trainer, **places})
        trainer: Trainer = make(
            strategy=build(config.strategy, known),
            callbacks=[metrics, *chosen, *ours],
            precision=config.precision,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            enable_progress_bar=any(isinstance(each, ProgressBar) for each in chosen),
            enable_model_summary=False,
            log_every_n_steps=config.log_every,
            plugins=_plugins(arguments.pop("plugins"), make.keywords.get("plugins", ()), ranks),
            **arguments,
        )
    except Exception as error:
        for each in tracking.tracked_runs(arguments["logger"]):
            each.close("failed")
        raise mistake(error) from error
    return trainer


def _plugins(ours: list[Any], users: Iterable[Any], ranks: meeting.Ranks) -> list[Any]:
    """Return the Trainer's plugins, with what tells Lightning this rank if the user's don't."""
    plugins = [*ours, *users]
    is_told = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    if ranks.world_size > 1 and not is_told:
        plugins.append(RanksEnvironment(ranks))
    return plugins


def _fail(
    directory: RunDirectory,
    config: Config,
    ranks: meeting.Ranks,
    error: Exception,
    terminal: TextIO,
) -> int:
    """Record a failure, return the exit status; print the run's first one, log the others."""
    shown, status = f"{PROGRAM} train: {error}", Exit.MISTAKE
    if not isinstance(error, UserError):
        text, model = traceback.format_exc(), getattr(error, "model", None)
        cause = remedies.explain_error(text, config, ranks.world_size, model)
        trace = "\n\n".join(filter(None, [cause, text]))
        path = directory.rank_log(ranks.rank) if ranks.rank else directory.log
        with contextlib.suppress(OSError), path.open("a") as log:
            log.write(trace)
        if meeting.lost_peers(error):
            return Exit.LOST_PEERS
        before = "" if isinstance(error, RunError) else f"{trace}\n"
        shown, status = f"{before}rank {ranks.rank} failed: {error}", Exit.FAILED
    said = f"{type(error).__name__}: {error}"
    if directory.record_failure({"rank": ranks.rank, "status": status, "error": said}):
        print(shown, file=terminal, flush=True)
    return status
