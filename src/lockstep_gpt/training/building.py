"""Builds what the configuration names with `_target_`: loggers, callbacks, and the Trainer."""

import difflib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config
from lockstep_gpt.distributed.cluster_environment import RanksEnvironment
from lockstep_gpt.distributed.exact_sums import AddsGradients
from lockstep_gpt.distributed.ranks import Ranks
from lockstep_gpt.errors import UserError, describe_error
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.model.language_model import LanguageModel
from lockstep_gpt.model.model_settings import build_gpt
from lockstep_gpt.module import GPTModule
from lockstep_gpt.processes import limit_exit
from lockstep_gpt.registry import CALLBACKS, MODEL, additions
from lockstep_gpt.run.callbacks.checkpoints import Checkpoints
from lockstep_gpt.run.callbacks.guards import Guards
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.run.callbacks.validation import ValidateEvery
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracker_guard import TrackerGuard
from lockstep_gpt.run.loggers.tracking import (
    ContinuedRun,
    TrackedRun,
    git_state,
    tracked_runs,
)
from lockstep_gpt.schedule import Schedule, scaled_lr
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.tokenizer import Tokenizer
from lockstep_gpt.training.clipping import ClipAndSkip
from lockstep_gpt.training.counted_targets import CountTargets
from lockstep_gpt.training.optim_settings import optimizer_of
from lockstep_gpt.training.replays import Replays
from lockstep_gpt.training.seeds import MicroBatchSeeds
from lockstep_gpt.training.trace import Trace

# What `trainer` may set: a run ends after its steps, not epochs, and its receipt names the model.
DEFAULTS = {
    "max_epochs": -1,
    "min_epochs": 0,  # with `min_steps`, Lightning's default is a whole epoch, which may never end
    "enable_model_summary": False,
}


def build(node: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build a `_target_` node with what it accepts of `known`, or raise a `UserError`."""
    accepted = inspect.signature(target_of(node)).parameters
    _refuse_unknown_arguments(node, accepted)
    arguments = {name: known[name] for name in accepted if name in known}
    try:
        return deferred(node)(**arguments)
    except (InstantiationException, TypeError, ImportError) as error:
        raise mistake(error) from error


def _refuse_unknown_arguments(
    node: dict[str, Any], accepted: Mapping[str, inspect.Parameter]
) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for name in node:
        if name not in accepted and not name.startswith("_"):  # such as `_target_`
            near = difflib.get_close_matches(name, accepted, n=1) or accepted
            raise UserError(f"{node['_target_']} has no argument {name}; use {' or '.join(near)}")


def build_callback(name: str, node: dict[str, Any], known: dict[str, Any]) -> Callback:
    """Build a callback, or raise a `UserError` if the class isn't one.

    Args:
        name: of the node.
        node: names the class.
        known: values for arguments with these names.
    """
    callback = build(node, known)
    if not isinstance(callback, Callback):
        raise UserError(
            f"callbacks.{name}: {node['_target_']} is not a callback; derive the class from "
            "lightning.Callback, or name another"
        )
    return callback


def target_of(node: dict[str, Any]) -> Callable[..., Any]:
    """Return what a `_target_` node names, or raise a `UserError`."""
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs what it raises
    if not {"", str(Path.cwd())} & {*sys.path}:  # as `python -m` does, but a script doesn't
        sys.path.append(str(Path.cwd()))
    try:
        return get_method(node["_target_"])
    except (InstantiationException, TypeError, ImportError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra's errors around it repeat the name
            cause = cause.__cause__
        target = node["_target_"]
        line = describe_error(cause)
        raise UserError(f"_target_={target} can't be imported; correct it ({line})") from error


def deferred(node: dict[str, Any]) -> Any:
    """Return a partial of a `_target_` node; Hydra would make configurations of its arguments."""
    # It may build what the configuration names. Hydra still rejects what runs arbitrary code.
    targets = re.findall(r'"(?:_target_|path)": "(.+?)"', json.dumps(node))
    allowed: dict[str, Any] = {}
    if "_execution_whitelist_" in inspect.signature(instantiate).parameters:
        allowed["_execution_whitelist_"] = targets
    return instantiate({**node, "_partial_": True}, _convert_="all", **allowed)


def mistake(error: Exception) -> UserError:
    """Return the error in one line; Hydra's own errors have it as their cause."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else None
    return UserError(" ".join(str(cause or error).split()))


def build_guards(
    directory: RunDirectory, config: Config, rank: int, terminal: TextIO
) -> list[Callback]:
    """Return the callbacks that keep the weights right, or that extras add."""
    guards: list[Callback] = []
    if config.guard.trace:
        guards.append(Trace(directory, config.log_every))
    if config.guard.verify_every is not None:
        guards.append(Replays(config.guard.verify_every, config.seed))
    for make_callbacks in additions(CALLBACKS):
        guards += make_callbacks(config, directory, rank, terminal)
    guards.append(
        Guards(
            stall_after=config.guard.stall_after,
            replicas_every=config.guard.replicas_every,
        )
    )
    return guards


def guard_loggers(directory: RunDirectory, config: Config) -> dict[str, TrackerGuard]:
    """Return a guard for each chosen logger.

    A logger's class may have a static method `prepare_start` for what takes long and needs only the
    logger's settings, such as starting a process. It runs while the rank makes its other parts.
    """
    seconds = seconds_of_trackers(config)
    guards = {}
    for name, node in config.logger.items():
        guard = TrackerGuard(name, seconds, directory)
        prepare_start = getattr(target_of(node), "prepare_start", None)
        if prepare_start is not None:
            guard.prepare(partial(prepare_start, **node))
        guards[name] = guard
    if guards:
        limit_exit(seconds)
    return guards


def build_loggers(
    guards: dict[str, TrackerGuard],
    directory: RunDirectory,
    config: Config,
    batch: Batch,
    tokens_per_sample: int,
    peak_lr: float | None,
    model: nn.Module,
) -> list[Logger]:
    """Build the chosen loggers, which can't end the run.

    Each gets those of these arguments that its class has, unless they are set: ours, the run and
    derived values; Lightning's, the run's folder and name, and the id to continue.

    Args:
        guards: of each logger, by its name.
        directory: the run.
        config: names the loggers.
        batch: how many samples a step has.
        tokens_per_sample: 0 if samples have none.
        peak_lr: the scaled rate; None if the module decides its own.
        model: what is trained.
    """
    derived: dict[str, Any] = {
        "world_size": batch.world_size,
        "global_batch_size": batch.global_size,
        "parameters": parameters_of(model, is_gpt=config.trains_gpt),
        **git_state(Path(__file__).parent),
    }
    if tokens_per_sample:
        derived["tokens_per_step"] = batch.global_size * tokens_per_sample
    if peak_lr is not None:
        derived["scaled_lr"] = peak_lr
    values = {**directory.values(), **derived}
    known = {
        "directory": directory,
        "config": values,
        "model": model,
        "save_dir": str(directory.path),
        "run_name": values["run_name"],
    }
    loggers = []
    for name, guard in guards.items():
        node = config.logger[name]
        kind = target_of(node)
        continued = ContinuedRun(directory, name, kind)
        offered = {**known, "guard": guard, "run_id": continued.run_id}
        unset = {key: value for key, value in offered.items() if key not in node}
        logger = guard.start(kind, partial(build, node, unset))
        if not isinstance(logger, TrackedRun) and continued.run_id is None:
            logger.log_hyperparams(values)  # a tracked run got them at its start
            guard.call("start", continued.remember, logger)
        loggers.append(logger)
    return loggers


def seconds_of_trackers(config: Config) -> float:
    """Return the limit of a call.

    A tracker that hangs must not look like a run that does, or take the time for a last save.
    """
    limits = [config.guard.tracker_seconds, config.launch.grace_seconds / 2]
    if config.guard.stall_after is not None:
        limits.append(config.guard.stall_after / 2)
    return min(limits)


def parameters_of(model: Any, *, is_gpt: bool) -> int:
    """Return how many numbers are trained or fixed; a GPT knows which of them are padding."""
    if is_gpt:
        return int(model.num_parameters)
    return sum(parameter.numel() for parameter in model.parameters())


def build_checkpoints(
    directory: RunDirectory,
    config: Config,
    batch: Batch,
    tokens_per_sample: int,
    tokenizer: Tokenizer | None,
) -> Checkpoints:
    """Return the callback that saves, with what every checkpoint needs to be read alone."""
    fixed: dict[str, Any] = {"config": directory.values()}
    if tokenizer is not None:
        fixed["tokenizer"] = tokenizer.to_dict()

    def content(trainer: Trainer) -> dict[str, Any]:
        return {**fixed, **progress_of(trainer, batch, tokens_per_sample)}

    settings = config.checkpoint
    return Checkpoints(
        directory.checkpoints,
        every=settings.every,
        keep_last=settings.keep_last,
        keep_best=settings.keep_best,
        monitor=settings.monitor,
        mode=settings.mode,
        content=content,
    )


def progress_of(trainer: Any, batch: Batch, tokens_per_sample: int) -> dict[str, int]:
    """Return how many samples, and tokens if they have some, all ranks together have seen.

    An earlier part of the run may have had steps of another size: our data module counts them.
    """
    samples = trainer.global_step * batch.global_size
    if isinstance(trainer.datamodule, TokenDataModule):
        samples = trainer.datamodule.samples_seen(trainer.global_step)
    if not tokens_per_sample:
        return {"samples": samples}
    return {"samples": samples, "tokens": samples * tokens_per_sample}


def build_own_module(config: Config) -> LightningModule:
    """Return the user's module, made of its arguments alone, with initial weights of the seed."""
    torch.manual_seed(config.seed)
    target = config.module["_target_"]
    kind = target_of(config.module)
    is_module = not isinstance(kind, type) or issubclass(kind, LightningModule)
    module = build(config.module, {}) if is_module else kind
    if not isinstance(module, LightningModule):
        raise UserError(f"module._target_={target} is no LightningModule; name a class that is one")
    if config.precision == "64-true":
        module.double()  # the Trainer would only do so after loading a checkpoint's weights
    return module


def schedule_of(config: Config, batch: Batch) -> Schedule:
    """Return the learning rate of a run with these settings."""
    optim = config.optim
    return Schedule(
        steps=config.max_steps,
        peak=scaled_lr(optim.lr, batch, optim.lr_scaling),
        warmup=optim.warmup_steps,
        decay=optim.decay,
        decay_fraction=optim.decay_fraction,
        final_fraction=optim.final_lr_fraction,
    )


def build_module(config: Config, schedule: Schedule, tokenizer: Tokenizer) -> GPTModule:
    """Return the GPT's module, with initial weights of the process's random numbers."""
    model = build_gpt(config.model, tokenizer.vocab_size)
    for transform in additions(MODEL):
        transform(model, config, tokenizer)
    if config.precision == "64-true":
        model.double()  # the Trainer would only do so after loading a checkpoint's weights
    return GPTModule(
        model,
        partial(optimizer_of(config.optim), lr=schedule.peak),
        schedule.factor,
        config.compile,
    )


def build_metrics(
    config: Config, batch: Batch, tokens_per_sample: int, model: LanguageModel | None
) -> Metrics:
    """Return what measures the run; of a `model` that is no GPT, the FLOPs are unknown."""
    return Metrics(
        batch,
        config.log_every,
        tokens_per_sample or None,
        model.flops_per_token if model else 0.0,
        config.peak_tflops,
    )


def updating(config: Config) -> list[Callback]:
    """Return what happens to gradients before an update, and after it.

    The Trainer clips those of the user's module, if `trainer.gradient_clip_val` is set.
    """
    max_norm = config.optim.clip_norm if config.trains_gpt else None
    return [ClipAndSkip(max_norm, config.guard.max_skipped)]


def beginning(config: Config, metrics: Metrics, data: LightningDataModule) -> list[Callback]:
    """Return the callbacks before the user's, in the order in which they act."""
    return [
        *validating(config),
        MicroBatchSeeds(config.seed),
        metrics,
        *counting(config, data),
    ]


def validating(config: Config) -> list[Callback]:
    """Return what validates; nothing if `trainer` lets validations follow epochs."""
    by_epochs = config.trainer.get("check_val_every_n_epoch") is not None
    if by_epochs or config.trainer.get("fast_dev_run"):
        return []
    return [ValidateEvery(config.val_every)]


def counting(config: Config, data: LightningDataModule) -> list[Callback]:
    """Return what weighs micro-batches by their targets; nothing if each target counts."""
    if not config.trains_gpt or not getattr(data, "may_ignore", True):
        return []
    samples = config.batch.micro_size or config.batch.global_size or 1
    return [CountTargets(counted_targets, typical=samples * config.model.block_size)]


def counted_targets(batch: Any) -> Tensor:
    """Return how many targets of a micro-batch count."""
    targets: Tensor = batch[1]
    return (targets != IGNORE).sum()


def build_trainer(
    config: Config,
    ranks: Ranks,
    batch: Batch,
    of_run: dict[str, Any],
    *,
    first: list[Callback],
    last: list[Callback],
    loggers: list[Logger],
    plugins: list[Any],
    **arguments: Any,
) -> Trainer:
    """Build the Trainer; the parts it always needs are not in groups that a user replaces.

    Args:
        config: names the Trainer, the strategy, and the user's callbacks.
        ranks: this rank among all.
        batch: decides how often the Trainer updates.
        of_run: values for callbacks of the user that have such arguments.
        first: callbacks before the user's, which see what these have measured.
        last: callbacks after the user's.
        loggers: all loggers; a tracked run ends if the Trainer can't be built.
        plugins: ours, in addition to the user's.
        arguments: others of the Trainer.
    """
    of_batch = batch.trainer_arguments(config.val_every)
    if not validating(config):  # then not by steps
        del of_batch["val_check_interval"], of_batch["check_val_every_n_epoch"]
    places = {"devices": ranks.local_world_size, "num_nodes": ranks.num_nodes}
    try:
        chosen = [
            build_callback(name, node, of_run)
            for name, node in config.callbacks.items()
            if "tokenizer" in of_run or not needs_tokenizer(node)
        ]
        has_bar = any(isinstance(callback, ProgressBar) for callback in chosen)
        defaults = {**DEFAULTS, **of_batch, "enable_progress_bar": has_bar}
        make_trainer = deferred({**defaults, **config.trainer, **places})
        users = make_trainer.keywords.get("plugins", ())
        trainer: Trainer = make_trainer(
            strategy=build_strategy(config, ranks),
            callbacks=[*first, *chosen, *last],
            logger=loggers,
            plugins=with_environment([*plugins, *users], ranks),
            precision=config.precision,
            log_every_n_steps=config.log_every,
            **arguments,
        )
    except Exception as error:
        for run in tracked_runs(loggers):
            run.close("failed")
        raise mistake(error) from error
    return trainer


def needs_tokenizer(node: dict[str, Any]) -> bool:
    """Return whether a callback is for text only, as the default one that shows samples."""
    argument = inspect.signature(target_of(node)).parameters.get("tokenizer")
    is_required = argument is not None and argument.default is argument.empty
    return is_required and "tokenizer" not in node


def build_strategy(config: Config, ranks: Ranks) -> Strategy:
    """Build the strategy, or raise a `UserError` if it can't add gradients as it should."""
    is_exact = config.batch.exact_micro_size is not None
    known = {"batch": batch_here(config, ranks)}
    strategy: Strategy = build(config.strategy, known)
    if is_exact and not isinstance(strategy, AddsGradients):
        raise UserError(
            f"batch.exact_micro_size is set, and {config.strategy['_target_']} adds gradients in "
            "an order of its own; set strategy=auto or strategy=ddp"
        )
    return strategy


def batch_here(config: Config, ranks: Ranks) -> Batch:
    """Return the batch as these ranks share it."""
    places = (ranks.local_world_size, ranks.num_nodes)
    return config.batch.build().spread_over(*places, config.tensor_parallel)


def with_environment(plugins: Iterable[Any], ranks: Ranks) -> list[Any]:
    """Return the Trainer's plugins, with what tells Lightning this rank if the user's don't."""
    complete = list(plugins)
    has_environment = any(isinstance(plugin, ClusterEnvironment) for plugin in complete)
    if ranks.world_size > 1 and not has_environment:
        complete.append(RanksEnvironment(ranks))
    return complete
