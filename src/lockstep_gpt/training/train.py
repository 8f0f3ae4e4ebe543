"""What one rank does: assemble, fit, report."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from lockstep_gpt.compose import build
from lockstep_gpt.config import PROGRAM, Config, RunError, UserError
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import load_index
from lockstep_gpt.data.tokenizer import from_dict
from lockstep_gpt.machine import LOST_PEERS
from lockstep_gpt.model.functional import attention_kernel, choose_matrix_products
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training import checkpoint, reporting, tracking
from lockstep_gpt.training import schedule as planning
from lockstep_gpt.training.callbacks import metrics as measuring
from lockstep_gpt.training.callbacks.checkpoints import AtomicCheckpointIO, Checkpoints
from lockstep_gpt.training.callbacks.guards import GracefulStop, Guards, Stopped
from lockstep_gpt.training.module import GPTModule, LeanLoop
from lockstep_gpt.training.ranks import (
    Ranks,
    backend_of,
    from_each_rank,
    from_rank_zero,
    join,
    leave,
    lost_peers,
)

logger = logging.getLogger(__name__)


def main(directory: RunDirectory) -> int:
    """Train as one rank: 0 done, 1 failed, 2 the user's mistake, 128 + n stopped by signal n."""
    config, ranks = directory.load(), Ranks.from_environment()
    with reporting.reporting(directory, ranks, config) as terminal, contextlib.ExitStack() as after:
        after.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        try:
            _train(directory, config, ranks, terminal)
        except Stopped as stopped:
            logger.info("%s after saving; the run can be resumed", stopped)
            return 128 + stopped.signum
        except UserError as error:
            if directory.record_failure(_failure(ranks, error, 2)):
                print(f"{PROGRAM} train: {error}", file=terminal, flush=True)
            return 2
        except Exception as error:
            hint = ""
            # extra cluster: begin
            from lockstep_gpt.cluster import remedies

            scene = remedies.Scene(config, ranks.world_size, getattr(error, "unused", ()))
            hint = remedies.explain(traceback.format_exc(), scene)
            # extra cluster: end
            return _fail(directory, ranks, error, terminal, hint)
    reporting.drop_rank_log(directory, ranks)
    return 0


def _fail(
    directory: RunDirectory, ranks: Ranks, error: Exception, terminal: TextIO, hint: str
) -> int:
    """Record a failure; the run's first is shown, what others see of it goes to their logs."""
    trace = "\n\n".join(filter(None, [hint, traceback.format_exc()]))
    with (directory.rank_log(ranks.rank) if ranks.rank else directory.log).open("a") as log:
        log.write(trace)
    if lost_peers(error):
        return LOST_PEERS
    if directory.record_failure(_failure(ranks, error, 1)):
        shown = "" if isinstance(error, RunError) else f"{trace}\n"
        print(f"{shown}rank {ranks.rank} failed: {error}", file=terminal, flush=True)
    return 1


def _failure(ranks: Ranks, error: Exception, status: int) -> dict[str, Any]:
    kind = type(error).__name__
    return {"rank": ranks.rank, "status": status, "error": f"{kind}: {error}"}


@dataclass
class Parts:
    """Everything that one rank assembles for a fit."""

    batch: planning.BatchPlan
    schedule: planning.Schedule
    data: TokenDataModule
    module: GPTModule
    metrics: measuring.Metrics
    checkpoints: Checkpoints
    checkpoint_io: AtomicCheckpointIO
    guards: Guards
    metrics_file: measuring.MetricsFile
    products: str  # the kind of float32 matrix products


def _train(directory: RunDirectory, config: Config, ranks: Ranks, terminal: TextIO) -> None:
    started = time.perf_counter()
    parts = _assemble(directory, config, ranks, terminal)
    join(ranks, config)
    _refuse_other_directory(directory)
    resume = _state_to_resume(directory, config, ranks, parts.module)
    # extra export: begin
    if config.model.init_from and not resume and config.resume in ("none", "auto"):
        start = {"_target_": "lockstep_gpt.export.initial_weights.initialize"}
        build(start, {"model": parts.module.model, "tokenizer": parts.module.tokenizer})
    # extra export: end
    loggers = _loggers(directory, config, parts) if ranks.rank == 0 else []
    lean = LeanLoop()
    trainer = _trainer(config, ranks, parts, loggers, lean)
    if ranks.rank == 0:
        logger.info("%s", reporting.as_text(_receipt(config, parts, ranks, trainer.strategy)))
        parts.metrics_file.begin(_step(resume))
        for each in tracking.tracked(loggers):
            each.begin(parts.module.model, config.log_every)
    status = "failed"
    try:
        trainer.fit(parts.module, parts.data, ckpt_path=resume)
        parts.checkpoint_io.wait()
        status = "done"
    except Stopped:
        parts.checkpoint_io.wait()
        status = "stopped"
        raise
    # extra cluster: begin
    except RuntimeError as error:
        from lockstep_gpt.cluster import remedies

        vars(error)["unused"] = remedies.without_gradient(parts.module.model)
        raise
    # extra cluster: end
    finally:
        lean.on_train_end()  # also where a hook failed before its own
        if ranks.rank == 0:
            seconds = time.perf_counter() - started
            directory.write_summary(_summary(directory, status, trainer, parts, seconds))
            kept = _kept_checkpoints(parts.checkpoints)
            for each in tracking.tracked(loggers):
                each.close(status, kept)
    leave()
    if ranks.rank == 0:
        logger.info(
            "%s",
            reporting.closing(directory, parts.metrics.row, time.perf_counter() - started),
        )


def _kept_checkpoints(checkpoints: Checkpoints) -> dict[Path, list[str]]:
    """Return the best and the last checkpoint with what wandb shall call them."""
    kept: dict[Path, list[str]] = {}
    for path, alias in ((checkpoints.best, "best"), (checkpoints.last, "latest")):
        if path is not None:
            kept.setdefault(path, [path.stem]).append(alias)
    return kept


def _copies(directory: RunDirectory, config: Config) -> str | None:
    """Return where copies of this run's checkpoints go."""
    url = config.checkpoint.copy_to
    return f"{url.rstrip('/')}/{directory.path.name}" if url else None


def _own_newest(directory: RunDirectory, config: Config, module: GPTModule) -> Path | None:
    """Tidy up after a run that was killed; return its newest checkpoint that verifies."""
    checkpoint.remove_leftovers(directory.checkpoints)
    checkpoint.refuse_full_disk(
        directory.path, 3 * checkpoint.size_of(module.state_dict())
    )  # AdamW: two moments each
    newest, copies = checkpoint.newest_valid(directory.checkpoints), _copies(directory, config)
    if newest is None and copies and config.resume == "auto":
        return checkpoint.fetch_newest(copies, directory.checkpoints)
    return newest


def _state_to_resume(
    directory: RunDirectory, config: Config, ranks: Ranks, module: GPTModule
) -> str | None:
    """Return the checkpoint to go on from: the run's own newest, else what `resume` names."""
    newest = _own_newest(directory, config, module) if ranks.rank == 0 else None
    own = from_rank_zero(str(newest or ""))
    if own or config.resume in ("none", "auto"):
        return own or None
    asked = Path(config.resume)
    found = (
        checkpoint.find_checkpoint(asked, directory.path / "artifacts") if ranks.rank == 0 else ""
    )
    path = Path(from_rank_zero(str(found)))
    content = checkpoint.read_checkpoint(path)
    if not config.resume_force:
        checkpoint.refuse_another_identity(path, content["config"], directory.values())
    if checkpoint.fits(module, content):
        return str(path)
    taken = checkpoint.adopt_weights(module, content)
    logger.warning("resume_force: took %d weights of %s, the rest is new", taken, path)
    return None


def _refuse_other_directory(directory: RunDirectory) -> None:
    """Compare the frozen files that the ranks have read: a folder may look shared and not be."""
    hashes = from_each_rank(directory.hash())
    others = [str(rank) for rank, content in enumerate(hashes) if content != hashes[0]]
    if others:
        raise UserError(
            f"run_dir={directory.path} of rank {', '.join(others)} is not the folder of rank 0; "
            "name one that all nodes share"
        )


def _assemble(directory: RunDirectory, config: Config, ranks: Ranks, terminal: TextIO) -> Parts:
    products = choose_matrix_products(config.trainer["accelerator"])
    torch.manual_seed(config.seed)
    batch = planning.plan_batch(
        config.batch, config.model.block_size, ranks.local_world_size, ranks.num_nodes
    )
    schedule = planning.plan_schedule(config, batch)
    folder = prepare(config.data)
    tokenizer = load_index(folder).tokenizer
    data = TokenDataModule(
        folder,
        block_size=config.model.block_size,
        micro_size=batch.micro_size,
        accumulation=batch.accumulation,
        seed=config.seed,
        val_tokens=config.data.val_tokens,
        num_workers=config.data.num_workers,
    )
    module = GPTModule(config, schedule, from_dict(tokenizer))
    content = {"config": directory.values(), "tokenizer": tokenizer}
    checkpoints = Checkpoints(
        directory.checkpoints,
        config.checkpoint,
        content,
        batch,
        schedule.total_steps,
        config.val_every,
    )
    return Parts(
        batch=batch,
        schedule=schedule,
        data=data,
        module=module,
        metrics=measuring.Metrics(
            config.log_every,
            batch.tokens_per_step,
            module.model.flops_per_token,
            _peak_tflops(config, batch.world_size),
        ),
        checkpoints=checkpoints,
        checkpoint_io=AtomicCheckpointIO(config.checkpoint.background, _copies(directory, config)),
        guards=Guards(config.guard, directory, ranks.rank, terminal),
        metrics_file=measuring.MetricsFile(directory.metrics, measuring.COLUMNS),
        products=products,
    )


def _peak_tflops(config: Config, world_size: int) -> float | None:
    """Return the peak of all devices together; TF32 has half of that of 16 bits."""
    peak = config.peak_tflops
    if peak is None and config.trainer["accelerator"] == "cuda":
        peak = measuring.peak_of(torch.cuda.get_device_name())
        peak = peak and peak * (0.5 if config.precision == "32-true" else 1.0)
    return peak and peak * world_size


def _loggers(directory: RunDirectory, config: Config, parts: Parts) -> list[Logger]:
    """Build what logs beside metrics.csv; ours are told the run and what it derives from it."""
    derived = {
        "world_size": parts.batch.world_size,
        "global_batch_size": parts.batch.global_size,
        "tokens_per_step": parts.batch.tokens_per_step,
        "scaled_lr": parts.schedule.peak_lr,
        "parameters": parts.module.model.num_parameters,
        **tracking.git_state(Path(__file__).parent),
    }
    known = {"directory": directory, "config": {**directory.values(), **derived}}
    return [build(node, known) for node in config.logger.values()]


def _trainer(
    config: Config, ranks: Ranks, parts: Parts, loggers: list[Logger], lean: LeanLoop
) -> Trainer:
    """Build the Trainer; what must always be there is not in the groups that a user replaces."""
    if config.compile:
        parts.module.model.compile(dynamic=False)
    if config.trainer.get("sync_batchnorm") and ranks.rank == 0:
        warn_without_batchnorm(parts.module)
    try:
        chosen: list[Callback] = [instantiate(node) for node in config.callbacks.values()]
        strategy = _strategy(config, ranks)
        stop = GracefulStop(parts.checkpoints)
        ours = [parts.guards, lean, stop, parts.checkpoints]
        callbacks = [parts.metrics, *chosen, *ours]
        arguments = {**config.trainer, "devices": ranks.local_world_size}
        trainer: Trainer = instantiate(
            {**arguments, "num_nodes": ranks.num_nodes},
            strategy=strategy,
            callbacks=callbacks,
            logger=[parts.metrics_file, *loggers],
            plugins=[parts.checkpoint_io],
            precision=config.precision,
            max_steps=parts.schedule.total_steps,
            max_epochs=-1,
            accumulate_grad_batches=parts.batch.accumulation,
            val_check_interval=config.val_every * parts.batch.accumulation,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except InstantiationException as error:
        raise UserError(" ".join(str(error).split())) from error
    return trainer


def warn_without_batchnorm(module: torch.nn.Module) -> None:
    """Say that `trainer.sync_batchnorm` has nothing to synchronise, if so."""
    batchnorm = torch.nn.modules.batchnorm._BatchNorm
    if not any(isinstance(each, batchnorm) for each in module.modules()):
        logger.warning("trainer.sync_batchnorm=true changes nothing: the model has no BatchNorm")


def _strategy(config: Config, ranks: Ranks) -> Strategy:
    known = {"accelerator": config.trainer["accelerator"], "world_size": ranks.world_size}
    strategy: Strategy = build(config.strategy, known)
    return strategy


def _receipt(config: Config, parts: Parts, ranks: Ranks, strategy: Strategy) -> dict[str, str]:
    model = parts.module.model
    group = f" over {backend_of(config)}" if ranks.world_size > 1 else ""
    kept = ", memory kept between steps" if os.environ.get("MALLOC_MMAP_MAX_") == "0" else ""
    facts = {
        "model": f"{model.num_parameters:,} parameters, vocabulary of {model.vocab_size:,} "
        f"tokens, context of {config.model.block_size}",
        "data": f"{parts.data.folder}, {parts.data.train_windows:,} windows to train on, "
        f"{parts.data.val_windows:,} to validate on",
        "devices": f"{ranks.world_size} x {config.trainer['accelerator']}, "
        f"{torch.get_num_threads()} threads each{kept}",
        "kernels": f"products by {parts.products}, attention by {_attention(config)}",
        "strategy": type(strategy).__name__ + group,
    }
    return reporting.receipt(config, parts.batch, parts.schedule, facts)


def _attention(config: Config) -> str:
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "64-true": torch.float64}
    model, device = config.model, config.trainer["accelerator"]
    kernel = attention_kernel(
        model.n_head,
        model.block_size,
        model.n_embd // model.n_head,
        device,
        dtype.get(config.precision, torch.float32),
    )
    if kernel == "math" and device == "cuda":
        logger.warning(
            "attention has no fused kernel here, and is slow: set precision=bf16-mixed, or a "
            "model.n_embd / model.n_head that divides by 8 and is at most 256"
        )
    return kernel


def _step(path: str | None) -> int:
    return checkpoint.step_of(Path(path)) if path else 0


def _summary(
    directory: RunDirectory, status: str, trainer: Trainer, parts: Parts, seconds: float
) -> dict[str, Any]:
    row, best, last = parts.metrics.row, parts.checkpoints.best, parts.checkpoints.last
    return {
        "status": status,
        "step": trainer.global_step,
        "tokens": trainer.global_step * parts.batch.tokens_per_step,
        "train_loss": row.get("train/loss"),
        "val_loss": row.get("val/loss"),
        "val_perplexity": row.get("val/perplexity"),
        "tokens_per_second": parts.metrics.tokens_per_second,
        "mfu": row.get("throughput/mfu"),
        "first_step_seconds": parts.metrics.first_step_seconds,
        "step_seconds_p50": row.get("throughput/step_seconds_p50"),
        "step_seconds_p95": row.get("throughput/step_seconds_p95"),
        "data_wait_share": row.get("data/wait_share"),
        "peak_memory_gb": row.get("system/peak_memory_gb"),
        "world_size": parts.batch.world_size,
        "global_batch_size": parts.batch.global_size,
        "lr": parts.schedule.peak_lr,
        "best_checkpoint": str(best) if best else None,
        "last_checkpoint": str(last) if last else None,
        "wandb_run_id": tracking.read_run_id(directory),
        "wall_seconds": seconds,
    }
