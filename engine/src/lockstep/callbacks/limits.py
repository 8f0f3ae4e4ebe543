"""What a run really has, and what it can't promise: said once, when training begins."""

import logging
import math
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from lockstep.loading.loaders import EvalLoader, Joined, TrainLoader
from lockstep.patches.lightning import acts_at_epochs
from lockstep.patches.torch import BatchNorm
from lockstep.settings import counted

logger = logging.getLogger(__name__)


def tell_limits(trainer: Trainer, pl_module: LightningModule) -> None:
    """Log the optimizers, and why results may depend on the number of ranks, or on restarts."""
    for line in optimizer_lines(trainer):
        logger.info("  optimizer  %s", line)
    warn_of_idle_schedulers(trainer)
    warn_of_idle_stopping(trainer)
    if trainer.world_size > 1:
        warn_of_own_statistics(pl_module)
    lines = limits_of_loaders(trainer)
    if lines:
        logger.info("  loaders  %s", "; ".join(lines))


def optimizer_lines(trainer: Trainer) -> list[str]:
    """Return a line for each optimizer that Lightning has: the rates of its groups, and by whom."""
    lines = []
    for optimizer in trainer.optimizers:
        rates = [f"{float(group['lr']):g}" for group in optimizer.param_groups if "lr" in group]
        if not rates:  # none, or what stands for one where `configure_optimizers` returned None
            continue
        line = f"{type(optimizer).__name__} begins with lr {', '.join(dict.fromkeys(rates))}"
        kinds = [
            type(config.scheduler).__name__
            for config in trainer.lr_scheduler_configs
            if config.scheduler.optimizer is optimizer
        ]
        setters = f"set by {' and '.join(kinds)}" if kinds else "with no scheduler"
        lines.append(f"{line}, {setters}")
    return lines


def warn_of_idle_stopping(trainer: Trainer) -> None:
    """Warn of an early stopping that waits for validations, or for an epoch, that won't come."""
    if any(count > 0 for count in trainer.num_val_batches):
        return
    for callback in trainer.early_stopping_callbacks:
        if not (acts_at_epochs(callback) and an_epoch_ends(trainer)):
            logger.warning(
                "EarlyStopping waits for %s, but this run has no validation: it will never stop; "
                "validate, or monitor a metric of training at the end of epochs",
                getattr(callback, "monitor", "a metric"),
            )


def an_epoch_ends(trainer: Trainer) -> bool:
    """Return whether an epoch ends before the run's last step."""
    steps = trainer.num_training_batches / trainer.accumulate_grad_batches
    return steps < math.inf and (trainer.max_steps < 0 or steps <= trainer.max_steps)


def warn_of_idle_schedulers(trainer: Trainer) -> None:
    """Warn of schedulers that wait for the end of an epoch which has none."""
    if trainer.num_training_batches != math.inf:
        return
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch":
            logger.warning(
                "%s waits for the end of an epoch, and this loader is endless, so the rate stays "
                'as it is; return {"scheduler": ..., "interval": "step", "frequency": STEPS} from '
                "configure_optimizers",
                type(config.scheduler).__name__,
            )


def warn_of_own_statistics(model: nn.Module) -> None:
    """Warn if layers normalize with the statistics of one rank's samples."""
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    count = sum(not isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    if count:
        logger.warning(
            "the model has %s, with the statistics of each rank's own samples: results depend on "
            "the number of ranks; use a norm over channels, or trainer.sync_batchnorm=true on GPUs",
            counted(count, "BatchNorm layer"),
        )


def limits_of_loaders(trainer: Trainer) -> list[str]:
    """Return what is up to loaders that aren't ours; empty if all are."""
    lines = []
    train = loaders_in(trainer.train_dataloader)
    if not all(isinstance(loader, TrainLoader) for loader in train):
        lines.append(
            f"train_dataloader returns {names_of(train)}, not a train_loader: the order of "
            "samples, restarts in mid-epoch, and equal results on other numbers of devices are "
            "up to it"
        )
    val = loaders_in(trainer.val_dataloaders)
    if not all(isinstance(loader, EvalLoader | Joined) for loader in val):
        lines.append(
            f"val_dataloader returns {names_of(val)}, not an eval_loader: several ranks may "
            "count samples twice"
        )
    return lines


def loaders_in(loaders: Any) -> list[Any]:
    """Return the loaders in any nesting of them."""
    if loaders is None:
        return []
    if not isinstance(loaders, CombinedLoader):
        loaders = CombinedLoader(loaders)
    return list(loaders.flattened)


def names_of(loaders: list[Any]) -> str:
    """Return the names of their classes."""
    return " and ".join(sorted({f"a {type(loader).__name__}" for loader in loaders}))
