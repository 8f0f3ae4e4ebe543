"""Says what a run cannot promise for loaders that aren't ours."""

import logging
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from lockstep_gpt.loading.loaders import EvalLoader, Joined, TrainLoader

logger = logging.getLogger(__name__)


class OwnLoaders(Callback):
    """Completes the receipt of a run once its loaders exist; it has no line for ours."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log one line on rank 0."""
        if not trainer.is_global_zero:
            return
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
        if lines:
            logger.info("  %s  %s", "loaders", "; ".join(lines))


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
