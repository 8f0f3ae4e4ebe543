"""A run from Python, as in a notebook: its configuration, module, data module, and Trainer.

from lockstep_gpt.notebook import build, compose

config = compose("experiment=smoke")
module, data, trainer = build(config)
trainer.fit(module, data)
"""

import contextlib
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import DictConfig

from lockstep_gpt import stop_signals
from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config, from_container
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.distributed.matrix_products import choose_matrix_products
from lockstep_gpt.distributed.ranks import Ranks
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import checks, devices, resolving
from lockstep_gpt.launch import compose as composing
from lockstep_gpt.launch.hydra_errors import as_user_error
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.launch.start import (
    RANK,
    Freezing,
    NewRun,
    prepare_data,
    prepare_gpt,
)
from lockstep_gpt.logs import LEVELS, log_to_stdout
from lockstep_gpt.run import last_line
from lockstep_gpt.run.callbacks.stopping import Stopped
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.settings import check
from lockstep_gpt.training import ending, train
from lockstep_gpt.training.batches import build_data, tokens_of_sample
from lockstep_gpt.training.building import (
    beginning,
    build_metrics,
    build_trainer,
    updating,
)
from lockstep_gpt.training.initial_weights import load_initial_weights
from lockstep_gpt.module import GPTModule
from lockstep_gpt.training.rank_output import routed_output
from lockstep_gpt.training.train import Training

logger = logging.getLogger(__name__)

SEVERAL_RANKS = "from lockstep_gpt import cli; cli.main(['train', ...])"


class Parts(NamedTuple):
    """What Lightning trains with."""

    module: LightningModule
    data: LightningDataModule
    trainer: Trainer


def compose(*overrides: str) -> DictConfig:
    """Return the configuration that the command `train` would use.

    Args:
        overrides: each as on the command line, such as `"experiment=smoke", "optim.lr=1e-3"`.

    Raises:
        UserError: an override or a YAML file is wrong.
    """
    words = ", ".join(map(repr, overrides))
    if not all(isinstance(word, str) for word in overrides):
        example = 'compose("experiment=smoke", "optim.lr=1e-3")'
        raise UserError(f"compose({words}): give each override as a text, as in {example}")
    composed: list[DictConfig] = []
    with log_to_stdout():
        composing.run([*overrides], composed.append)
        if len(composed) != 1:
            rule = f"makes {len(composed)} configurations; leave out flags such as --multirun"
            raise UserError(f"compose({words}) {rule}")
        config = composed[0]
        _, checked = _checked(config, *overrides)
        checks.refuse_settings_of_gpt(checked, [*overrides])
        _batch(checked, _one_rank(checked))  # may refuse it
    return config


def build(config: DictConfig) -> Parts:
    """Return what trains with this configuration, as one rank, in this process.

    With a `run_dir`, the training writes there what the command would. Without, it writes nothing.

    Args:
        config: from `compose`, or from `hydra.compose`.

    Raises:
        UserError: a setting is invalid, can't work in this process, or needs several ranks.
    """
    if not hasattr(config, "items"):
        raise UserError(f'build({config!r}): write build(compose("experiment=smoke"))')
    values, checked = _checked(config)
    rule = "is for the command; call trainer.fit(module, data, ckpt_path=...)"
    check("resume", checked.resume, checked.resume == "none", rule)
    placement = _one_rank(checked)
    values["trainer"] = resolving.resolved_trainer(values, placement)
    batch = _batch(checked, placement)
    values["batch"]["global_size"] = batch.global_size
    if checked.run_dir is None:
        return _without_directory(values)
    directory = RunDirectory(Path(checked.run_dir))
    values["run_name"] = checked.run_name or directory.path.name
    return _in_directory(directory, values)


def _checked(config: DictConfig, *overrides: str) -> tuple[dict[str, Any], Config]:
    """Return the plain values of a configuration, and the same as a checked `Config`."""
    with as_user_error([*overrides]):
        values = composing.values_to_freeze(config)
        checked = from_container(values)
    checks.refuse_conflicts(checked)
    return values, checked


def _one_rank(config: Config) -> Placement:
    """Return the place of the only rank; one of several devices, if the number is open."""
    if config.trainer.get("devices", "auto") == "auto":
        config = replace(config, trainer={**config.trainer, "devices": 1})
    placement = devices.place(config)
    if placement.world_size > 1:
        raise UserError(
            f"trainer.devices={placement.devices} with trainer.num_nodes={placement.nodes} needs "
            f"{placement.world_size} processes, but this is one; run {SEVERAL_RANKS}"
        )
    return placement


def _batch(config: Config, placement: Placement) -> Batch:
    return config.batch.build().spread_over(placement.devices, placement.nodes)


def _without_directory(values: dict[str, Any]) -> Parts:
    """Return the parts of a training that writes nothing: no log, checkpoints, or trackers."""
    with log_to_stdout():
        values["data"]["fingerprint"] = prepare_data(from_container(values))
    config = from_container(values)
    if config.trains_gpt:
        choose_matrix_products(config.trainer["accelerator"])
    torch.manual_seed(config.seed)
    ranks = Ranks()
    batch = train.batch_of(config, ranks)
    data = build_data(config, batch)
    tokens = tokens_of_sample(config, data)
    module, _, tokenizer = train.module_of(config, batch, data)
    model = None
    if isinstance(module, GPTModule) and tokenizer is not None:
        model = module.model
        load_initial_weights(config.model, model, tokenizer)
    metrics = build_metrics(config, batch, tokens, model)
    trainer = build_trainer(
        config,
        ranks,
        batch,
        train.known_to_callbacks(config, tokenizer),
        first=beginning(config, metrics, data),
        last=[*updating(config), ValidateAtEnd(), ShowLog(LEVELS[config.verbosity])],
        loggers=[DummyLogger()],  # for callbacks that need one; it drops what it gets
        plugins=[],
        max_steps=config.max_steps,
        use_distributed_sampler=not isinstance(data, TokenDataModule),
        enable_checkpointing=False,
    )
    return Parts(module, data, trainer)


def _in_directory(directory: RunDirectory, values: dict[str, Any]) -> Parts:
    """Return the parts of a training that fills a new run directory."""
    with contextlib.ExitStack() as stack:
        freezing = Freezing(NewRun(directory, values, RANK, prepare_gpt), stack)
        with log_to_stdout():
            freezing.freeze()
        try:
            training = train.assemble(directory, directory.load(), Ranks(), sys.stderr, None)
        except BaseException:
            freezing.undo()
            raise
        around = AroundFit(training, stack.pop_all())
    training.trainer.callbacks.append(around)  # type: ignore[attr-defined]
    return Parts(training.module, training.data, training.trainer)


class ValidateAtEnd(Callback):
    """Lets the last step have a validation, as in the command, whatever `val_every` is."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop at the last step: Lightning validates before it stops."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True


class ShowLog(Callback):
    """Prints progress and samples during a training without a run directory.

    Args:
        level: of the log records to print.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self.undo = contextlib.ExitStack()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Print log records from now on."""
        if stage == "fit":
            self.undo.enter_context(log_to_stdout())
            logging.root.setLevel(self.level)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Restore what handled them before."""
        self.undo.close()

    def on_exception(self, *_: Any) -> None:
        """Do the same after an exception or an interrupt."""
        self.undo.close()


class AroundFit(Callback):
    """Does what the command does before and after it calls `Trainer.fit`.

    Args:
        training: the parts of the run.
        lock: is closed when the training ends.
    """

    def __init__(self, training: Training, lock: contextlib.ExitStack) -> None:
        self.training = training
        self.undo = lock
        self.started = 0.0  # clock

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Open the log, and print the receipt."""
        if stage != "fit":
            return
        training = self.training
        self.started = time.perf_counter()
        self.undo.enter_context(stop_signals.restored())
        self.undo.enter_context(
            routed_output(training.directory, Ranks(), training.config.verbosity)
        )
        training.metrics.continue_from(training.metrics_file.truncate_after(0))
        train.announce(training)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the summary, and print what is next."""
        self._conclude(ending.status_of(trainer), saved=True)
        logger.info("%s", train.last_lines(self.training, self.started))

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Close the log, and unlock the run directory."""
        if stage == "fit":
            self.undo.close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the summary of a training that was stopped or has failed."""
        if trainer.state.fn != "fit":
            return
        with self.undo:
            if isinstance(exception, Stopped):
                self._conclude("stopped", saved=exception.saved)
                logger.info("%s; %s", exception, last_line.way_on(self.training.directory))
            else:
                self._conclude("failed", saved=False)

    def _conclude(self, status: str, *, saved: bool) -> None:
        disk: Any = self.training.trainer.strategy.checkpoint_io
        disk.wait()  # for all writes
        facts = {"saved": saved, "wall_seconds": time.perf_counter() - self.started}
        train.conclude(self.training, status, facts)
