"""What a run shows of each source: its loss, its tokens, its epochs, and its state."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lockstep_gpt.config import Config
from lockstep_gpt.data import shards
from lockstep_gpt.data.datamodule import TokenDataModule, data_place
from lockstep_gpt.data.recipe import folder_of
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.datasets.attention_line import AttentionLine
from lockstep_gpt.extras.datasets.mask_settings import DocumentSettings
from lockstep_gpt.extras.datasets.mixture import Mixture
from lockstep_gpt.extras.datasets.past import (
    RULE,
    TURNS,
    keep_past,
    order_of,
    samples_of,
)
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.step_rows import log_row
from lockstep_gpt.training.receipt import times
from lockstep_gpt.training.token_loss import TokenLoss

logger = logging.getLogger(__name__)
EPOCHS = 4  # up to which repeated tokens are nearly as good as new ones (Muennighoff et al. 2023)


class LossBySource(TokenLoss):
    """The validation loss of each source, exact; their mean by the weights of the last phase.

    Args:
        shares: of each source, by name; sum to 1.
        batches: how many validation batches each source has on each rank, in order.
    """

    def __init__(self, shares: dict[str, float], batches: Sequence[int]) -> None:
        super().__init__()
        self.shares = shares
        self.batches = [*batches]
        self.by_source: dict[str, float] = {}

    def compute(self) -> Tensor:
        """Return the mean over the sources, in nats."""
        per_rank = sum(self.batches)  # the ranks' values are one after another: rows
        means, counts = (
            torch.split(
                dim_zero_cat(part).double().cpu().reshape(-1, per_rank), self.batches, dim=1
            )
            for part in (self.means, self.counts)
        )
        for name, count in zip(self.shares, counts, strict=True):
            if not count.any():
                raise UserError(
                    f"data.sources.{name}: no target of its validation windows counts, so it has "
                    "no loss; raise data.val_tokens, or its val_fraction"
                )
        losses = [_mean(*pair) for pair in zip(means, counts, strict=True)]
        self.by_source = dict(zip(self.shares, losses, strict=True))
        used = [(share, self.by_source[name]) for name, share in self.shares.items() if share]
        return torch.tensor(sum(share * loss for share, loss in used), dtype=torch.float64)


def _mean(means: Tensor, counts: Tensor) -> float:
    totals = (means * counts).flatten().tolist()
    add = math.fsum if all(map(math.isfinite, totals)) else sum  # fsum rejects inf - inf
    return float(add(totals) / counts.sum())


class Sources(StepCallback):
    """Logs each source's validation loss and tokens; checks that a resumed run keeps its past."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        self.config: Any = config  # its data are a mixture
        self.directory = directory
        self.every = config.log_every

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the module's validation loss."""
        data: TokenDataModule = trainer.datamodule
        sizes = data.windows["train"].counts
        planned = data.samples_seen(trainer.max_steps)
        order = pl_module.config.data.mixed_order(sizes, planned, data.block_size)
        shares = dict(zip(order.sizes, map(float, order.phases[-1].shares), strict=True))
        rows = data.rows_by_part("val", data.validated, *data_place(trainer))
        pl_module.token_loss = LossBySource(shares, [*map(len, rows.values())])

    def receipt_lines(self) -> dict[str, str]:
        """Return the share, epochs, and state of each source."""
        folder = folder_of(self.config.data)
        order = order_of(self.config, folder)
        epochs = order.epochs(samples_of(self.config))
        states = shards.load_index(folder).settings["sources"]
        first, *later = order.phases
        shares = [
            f"{name} {float(share):.4g} = {times(epochs[name])} epochs of {states[name]}"
            for name, share in zip(order.sizes, first.shares, strict=True)
        ]
        lines = {"mixture": ", ".join(shares)}
        changes = []
        for phase in later:
            pairs = zip(order.sizes, phase.shares, strict=True)
            known = ", ".join(f"{name} {float(share):.4g}" for name, share in pairs)
            changes.append(f"from sample {phase.start:,}: {known}")
        if changes:
            lines["later"] = "; ".join(changes)
        return lines

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn of sources that are repeated often, and of those that are hardly used."""
        if not trainer.is_global_zero:
            return
        order = order_of(self.config, folder_of(self.config.data))
        samples = samples_of(self.config)
        counts = order.counts(samples)
        for name, epochs in order.epochs(samples).items():
            if epochs > EPOCHS:
                logger.warning(
                    "the run takes data.sources.%s %s times; beyond %d epochs the same tokens "
                    "teach less and less (Muennighoff et al. 2023): lower its share, or add text "
                    "to it",
                    name,
                    times(epochs),
                    EPOCHS,
                )
            elif counts[name] == 0:
                logger.warning(
                    "the run takes nothing from data.sources.%s: its share of %s windows is less "
                    "than one; raise its weight or its epochs, or train longer",
                    name,
                    f"{samples:,}",
                )
            elif self._is_cut(name, epochs):
                logger.warning(
                    "the run takes %s of %s windows of data.sources.%s, less than once; "
                    "data.epochs.%s counts over data.planned_tokens or, without weights, relative "
                    "to the other epochs",
                    f"{counts[name]:,}",
                    f"{order.sizes[name]:,}",
                    name,
                    name,
                )

    def _is_cut(self, name: str, epochs: float) -> bool:
        """Return whether the settings ask for a whole epoch of a source, and the run has less."""
        wanted: float = self.config.data.epochs.get(name, 0)
        return wanted >= 1 and epochs < 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Record the rule by which the sources take turns."""
        checkpoint[TURNS] = RULE

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if a run in its own directory has settings with another past."""
        is_of_this_run = Path(trainer.ckpt_path).parent == self.directory.checkpoints
        if is_of_this_run and not pl_module.config.resume_force:
            keep_past(checkpoint, pl_module.config, trainer.datamodule.folder)

    def on_step_end(self, trainer: Any, pl_module: Any, step: int) -> None:
        """Log each source's tokens so far."""
        if step % self.every == 0 or step == trainer.max_steps:
            data: TokenDataModule = trainer.datamodule
            sizes = data.windows["train"].counts
            planned = data.samples_seen(trainer.max_steps)
            order = pl_module.config.data.mixed_order(sizes, planned, data.block_size)
            counts = order.counts(data.samples_seen(step)).items()
            tokens = {f"data/tokens/{name}": count * data.block_size for name, count in counts}
            _log(trainer, tokens)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute each source's loss, also for callbacks that monitor one."""
        pl_module.token_loss.compute()  # the module asks for it next, and gets the same
        pl_module.log_dict(_losses(pl_module), logger=False, sync_dist=True, reduce_fx="max")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log each source's loss."""
        _log(trainer, _losses(pl_module))


def _losses(module: Any) -> dict[str, float]:
    return {f"val/loss/{name}": loss for name, loss in module.token_loss.by_source.items()}


def _log(trainer: Any, row: dict[str, float]) -> None:
    log_row(trainer.loggers, row, trainer.global_step)


def callbacks(
    config: Config, directory: RunDirectory, _rank: int, _terminal: Any
) -> list[Callback]:
    """Return the callbacks of a mixture, and of documents that don't see each other."""
    chosen: list[Callback] = []
    if isinstance(config.data, Mixture):
        chosen.append(Sources(config, directory))
    if DocumentSettings.of(config).mask:
        chosen.append(AttentionLine(config))
    return chosen
