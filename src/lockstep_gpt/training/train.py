"""What one rank does, from top to bottom: assemble, announce, fit, conclude."""

import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep_gpt import stop_signals
from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config, as_values
from lockstep_gpt.distributed.flight_recorder import record_collectives
from lockstep_gpt.distributed.matrix_products import (
    choose_matrix_products,
    restored_afterward,
)
from lockstep_gpt.distributed.ranks import (
    Ranks,
    backend_of,
    is_restart,
    join,
    leave,
    lost_peers,
)
from lockstep_gpt.errors import UserError
from lockstep_gpt.exits import Exit, after_signal
from lockstep_gpt.model.model_settings import build_gpt
from lockstep_gpt.module import GPTModule
from lockstep_gpt.optim import moment_bytes
from lockstep_gpt.processes import refuse_as_program
from lockstep_gpt.run import last_line
from lockstep_gpt.run.callbacks.arithmetic import Arithmetic
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.run.callbacks.stopping import (
    GracefulStop,
    Stopped,
    stop_before_first_step,
)
from lockstep_gpt.run.callbacks.weight_hashes import WeightHashes
from lockstep_gpt.run.checkpoint_copies import copies_of, fetch
from lockstep_gpt.run.checkpoint_io import AtomicCheckpointIO
from lockstep_gpt.run.checkpoint_room import size_of
from lockstep_gpt.run.checkpoint_sums import VerifiedCheckpoint
from lockstep_gpt.run.checkpoint_writing import checkpoint_io
from lockstep_gpt.run.directory import RunDirectory, refuse_another_identity
from lockstep_gpt.run.failures import report_failure
from lockstep_gpt.run.loggers.tracking import tracked_runs
from lockstep_gpt.run.memory.files import KeptState
from lockstep_gpt.run.memory.writer import MemoryWriter
from lockstep_gpt.run.metrics_file import MetricsFile
from lockstep_gpt.run.metrics_rows import COLUMNS, OF_TOKENS
from lockstep_gpt.run.resuming import (
    CompareSettings,
    RefuseUnfit,
    refuse_other_directory,
    state_to_resume,
)
from lockstep_gpt.sample import prompt_from
from lockstep_gpt.schedule import Schedule
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.tokenizer import Tokenizer
from lockstep_gpt.training import ending, receipt
from lockstep_gpt.training.batches import (
    build_data,
    epochs_of,
    tokenizer_of,
    tokens_of_sample,
)
from lockstep_gpt.training.building import (
    beginning,
    build_checkpoints,
    build_guards,
    build_loggers,
    build_metrics,
    build_module,
    build_own_module,
    build_trainer,
    guard_loggers,
    schedule_of,
    updating,
)
from lockstep_gpt.training.initial_weights import load_initial_weights
from lockstep_gpt.training.optim_settings import optimizer_of
from lockstep_gpt.training.rank_output import drop_rank_log, routed_output

logger = logging.getLogger(__name__)


@dataclass
class Training:
    """The parts of one rank's training, in the order in which `assemble` makes them."""

    directory: RunDirectory
    config: Config
    rank: int
    batch: Batch
    tokens_per_sample: int  # 0: samples have none
    schedule: Schedule | None  # of the GPT's rate; another module decides its own
    data: LightningDataModule
    tokenizer: Tokenizer | None  # of the GPT
    module: LightningModule
    resume: VerifiedCheckpoint | KeptState | None  # what to continue from; None: step 0
    metrics: Metrics
    metrics_file: MetricsFile
    trainer: Trainer
    products: str  # the library of the GPT's float32 matrix products


def main(directory: RunDirectory, store: Store | None = None) -> int:
    """Train as one rank, and return its exit status.

    Args:
        directory: the run, whose configuration is frozen.
        store: where the ranks of a launcher have met; None: they meet now, or there is only one.
    """
    config = directory.load()
    ranks = Ranks.from_environment()
    output = routed_output(directory, ranks, config.verbosity)
    with output as terminal, restored_afterward():
        try:
            started = time.perf_counter()
            training = assemble(directory, config, ranks, terminal, store)
            is_announced = is_restart() and training.resume is not None
            if ranks.rank == 0 and not is_announced:
                announce(training)
            fit(training, started)
        except Stopped as stopped:
            if ranks.rank == 0 and stopped.saved:
                logger.info("%s; %s", stopped, last_line.way_on(directory))
            return after_signal(stopped.signum)
        except KeyboardInterrupt:  # a Ctrl-C before training
            raise
        except BaseException as error:
            signum = stop_signals.received.first
            if signum is not None and lost_peers(error):  # which got the signal, too
                return after_signal(signum)
            status = report_failure(directory, ranks, error, terminal)
            last_line.show_end_of_rank(directory, ranks.rank, status, terminal)
            return status
    drop_rank_log(directory, ranks)
    return Exit.DONE


def assemble(
    directory: RunDirectory, config: Config, ranks: Ranks, terminal: TextIO, store: Store | None
) -> Training:
    """Make everything that a run needs, from the ranks' connection to the Trainer."""
    # Ranks: joining also selects the GPU; meanwhile, the processes of trackers start.
    trackers = guard_loggers(directory, config) if ranks.rank == 0 else {}
    join_others(config, directory, ranks, store)
    products = choose_matrix_products(config.trainer["accelerator"]) if config.trains_gpt else ""
    torch.manual_seed(config.seed)

    # Data and module.
    batch = batch_of(config, ranks)
    data = build_data(config, batch)
    tokens = tokens_of_sample(config, data)
    module, schedule, tokenizer = module_of(config, batch, data)
    gpt = module.model if isinstance(module, GPTModule) else None
    model = module if gpt is None else gpt

    # Weights: those of the run's newest state, in memory or on disk, or initial ones.
    hashes = WeightHashes()
    disk = build_disk(config, directory, hashes)
    writer = None
    resume = weights_to_begin_with(directory, config, module, tokenizer, writer)
    disk.verified = resume
    is_ours = isinstance(data, TokenDataModule)
    disk.refuse_unfit = unfit = RefuseUnfit(compare_with(config), is_ours)

    # What watches and keeps the run, and the Trainer.
    metrics = build_metrics(config, batch, tokens, gpt)
    metrics_file = MetricsFile(directory.metrics, columns_of(tokens))
    checkpoints = build_checkpoints(directory, config, batch, tokens, tokenizer)
    guards = build_guards(directory, config, ranks.rank, terminal)
    stop = GracefulStop(checkpoints, timeout=config.longest_wait)
    saving = [unfit, hashes, Arithmetic(), stop, checkpoints]
    peak_lr = schedule.peak if schedule else None
    loggers = build_loggers(trackers, directory, config, batch, tokens, peak_lr, model)
    trainer = build_trainer(
        config,
        ranks,
        batch,
        known_to_callbacks(config, tokenizer),
        first=beginning(config, metrics, data),
        last=[*guards, *updating(config), *saving],
        loggers=[metrics_file, *loggers],
        plugins=[disk],
        default_root_dir=directory.path,
        max_steps=config.max_steps,
        use_distributed_sampler=not is_ours,
    )
    made = (batch, tokens, schedule, data, tokenizer, module, resume)
    return Training(directory, config, ranks.rank, *made, metrics, metrics_file, trainer, products)


def compare_with(config: Config) -> CompareSettings | None:
    """Return what refuses a checkpoint with other settings; None if `config` permits them."""
    if config.resume_force:
        return None
    return partial(refuse_another_identity, ours=as_values(config))


def module_of(
    config: Config, batch: Batch, data: LightningDataModule
) -> tuple[LightningModule, Schedule | None, Tokenizer | None]:
    """Return the GPT's module with the schedule of its rate and its tokenizer, or the user's."""
    if not config.trains_gpt:
        return build_own_module(config), None, None
    schedule = schedule_of(config, batch)
    tokenizer = tokenizer_of(data)
    return build_module(config, schedule, tokenizer), schedule, tokenizer


def columns_of(tokens_per_sample: int) -> list[str]:
    """Return the columns with which `metrics.csv` begins; a module may log others."""
    return [name for name in COLUMNS if tokens_per_sample or name not in OF_TOKENS]


def known_to_callbacks(config: Config, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return values for callbacks of the user that have such arguments."""
    known: dict[str, Any] = {"seed": config.seed, "monitored": config.checkpoint.monitor}
    if tokenizer is None:
        return known
    new_model = partial(build_gpt, config.model, tokenizer.vocab_size)
    return {**known, "tokenizer": tokenizer, "new_model": new_model}


def bytes_of_state(config: Config, model: nn.Module) -> int:
    """Return the bytes of a checkpoint; of the user's module, with two moments for each weight."""
    if config.trains_gpt:
        moments = moment_bytes(optimizer_of(config.optim)(model.named_parameters(), lr=0.0))
    else:
        moments = sum(2 * weight.nbytes for weight in model.parameters() if weight.requires_grad)
    return moments + size_of(model.state_dict())


def join_others(config: Config, directory: RunDirectory, ranks: Ranks, store: Store | None) -> None:
    """Connect to the other ranks; NCCL's last collectives are recorded from then on."""
    accelerator = config.trainer["accelerator"]
    backend = config.strategy.get("process_group_backend")
    record_collectives(backend_of(accelerator, backend), directory.rank_logs)
    join(ranks, store, accelerator=accelerator, backend=backend, timeout=config.longest_wait)


def weights_to_begin_with(
    directory: RunDirectory,
    config: Config,
    module: LightningModule,
    tokenizer: Tokenizer | None,
    writer: MemoryWriter | None,
) -> VerifiedCheckpoint | KeptState | None:
    """Return what to resume from; without it, load initial weights, if the GPT has a source."""
    refuse_other_directory(directory)
    resume = state_to_resume(
        directory,
        module,
        config.resume,
        force=config.resume_force,
        in_memory=config.checkpoint.memory is not False,
        writer=writer,
        fetch_copy=partial(fetch_copy, config, directory),
        saves_parts=config.saves_parts,
        loses_error=config.loses_error,
        timeout=config.longest_wait,
    )
    if isinstance(resume, VerifiedCheckpoint) and resume.path.parent != directory.checkpoints:
        ending.refuse_finished(config, resume)
    is_new = resume is None and config.resume in ("none", "auto")
    if is_new and isinstance(module, GPTModule) and tokenizer is not None:
        load_initial_weights(config.model, module.model, tokenizer)
    return resume


def build_disk(config: Config, directory: RunDirectory, hashes: WeightHashes) -> AtomicCheckpointIO:
    """Return what writes the run's checkpoints, and copies of them if that is set."""
    copy_to = config.checkpoint.copy_to
    return checkpoint_io(
        directory,
        hashes,
        background=config.checkpoint.background,
        copy_to=copies_of(config.run_dir or directory.path, copy_to) if copy_to else None,
        continues=config.resume == "auto",
    )


def fetch_copy(config: Config, directory: RunDirectory) -> VerifiedCheckpoint | None:
    """Fetch the run's newest copy of a checkpoint, if there is one."""
    copy_to = config.checkpoint.copy_to
    if not copy_to:
        return None
    return fetch(directory, config.run_dir or directory.path, copy_to, force=config.resume_force)


def batch_of(config: Config, ranks: Ranks) -> Batch:
    """Return how the run's batch is spread over `ranks`."""
    places = (ranks.local_world_size, ranks.num_nodes)
    return config.batch.build().spread_over(*places, config.tensor_parallel)


def announce(training: Training) -> None:
    """Print the receipt."""
    config = training.config
    schedule = training.schedule
    steps = training.trainer.max_steps
    epochs = epochs_of(training.data, steps * training.batch.global_size)
    module: nn.Module = training.module
    details = receipt.details_of_callbacks(training.trainer)
    if isinstance(module, GPTModule):
        module = module.model
    facts = receipt.facts(config, module, training.data, training.trainer, training.products)
    batch = training.batch
    tokens = training.tokens_per_sample
    lines = receipt.receipt_lines(config, batch, tokens, schedule, epochs, facts, details)
    logger.info("%s", receipt.as_text(lines))


def fit(training: Training, started: float) -> None:
    """Train to the end, and conclude the run, however it ends.

    Args:
        training: the rank's parts.
        started: the clock when this rank began.
    """
    trainer = training.trainer
    status = "failed"
    saved = False
    stop_signals.note()  # from here on, all ranks stop after the same step
    try:
        stop_before_first_step()
        if training.rank == 0:
            step = training.resume.step if training.resume else 0
            training.metrics.continue_from(training.metrics_file.truncate_after(step))
        disk: Any = trainer.strategy.checkpoint_io
        path = str(training.resume.path) if training.resume else None
        try:
            trainer.fit(training.module, training.data, ckpt_path=path)
        finally:
            disk.wait()  # for all writes
        status = ending.status_of(trainer)
        saved = True
    except Stopped as stopped:
        status = "stopped"
        saved = stopped.saved
        raise
    finally:
        if training.rank == 0:
            facts = {"saved": saved, "wall_seconds": time.perf_counter() - started}
            conclude(training, status, facts)
    leave()
    if training.rank == 0:
        logger.info("%s", last_lines(training, started))


def last_lines(training: Training, started: float) -> str:
    """Return how the run that began at `started` ended, where its files are, and what is next."""
    prompt = None
    if training.tokenizer is not None:
        prompt = prompt_from(training.data, training.tokenizer)
    row = training.metrics.row
    return ending.last_lines(training.directory, training.trainer, row, started, prompt)


def conclude(training: Training, status: str, facts: dict[str, Any]) -> None:
    """Write `summary.json`, which gets `facts`, and end the runs of trackers."""
    directory = training.directory
    if training.schedule is not None:
        facts = {**facts, "lr": training.schedule.peak}
    facts = {
        **facts,
        "world_size": training.batch.world_size,
        "global_batch_size": training.batch.global_size,
    }
    # After a failure, such as the loss of a peer, an unusable disk is no second one.
    is_failed = status == "failed"
    guarded = contextlib.suppress(OSError, UserError) if is_failed else directory.writing()
    with guarded:
        ending.write_summary(directory, status, training.trainer, facts)
    for run in tracked_runs(training.trainer.loggers):
        run.close(status)


if __name__ == "__main__":
    refuse_as_program(__file__)
