"""What a run shows of each source: its loss, its tokens, its epochs, and its state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.datasets.mixed_order import MixedOrder
from lockstep_gpt.extras.datasets.mixture import Mixture
from lockstep_gpt.extras.datasets.past import (
    RULE,
    TURNS,
    keep_past,
    order_of,
    samples_of,
)
from lockstep_gpt.model.functional import perplexity
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.step_rows import log_row
from lockstep_gpt.run.means import Entry, Mean, exact_mean, replace_mean
from lockstep_gpt.tokens import shards
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.recipe import folder_of
from lockstep_gpt.training.receipt import times

logger = logging.getLogger(__name__)
EPOCHS = 4  # up to which repeated tokens are nearly as good as new ones (Muennighoff et al. 2023)


class LossBySource(Mean):
    """The validation loss of each source, exact; their mean by the weights of the last phase.

    Args:
        shares: of each source, by name; sum to 1.
        batches: how many validation batches each source has on each rank, in order.
    """

    def __init__(self, shares: dict[str, float], batches: Sequence[int]) -> None:
        super().__init__("val/loss", also={"val/perplexity": perplexity})
        self.shares = shares
        self.batches = [*batches]

    def columns(self, ranks: Sequence[list[Entry]]) -> dict[str, float]:
        """Return the mean over the sources, in nats, and the loss of each."""
        losses = {}
        first = 0
        for name, count in zip(self.shares, self.batches, strict=True):
            last = first + count
            entries = [entry for of_rank in ranks for entry in of_rank[first:last]]
            first = last
            if not any(weight for _, weight in entries):
                raise UserError(
                    f"data.sources.{name}: no target of its validation windows counts, so it has "
                    "no loss; raise data.val_tokens, or its val_fraction"
                )
            losses[name] = exact_mean(entries)
        mean = sum(share * losses[name] for name, share in self.shares.items() if share)
        row = {self.name: mean, **{name: derive(mean) for name, derive in self.also.items()}}
        return {**row, **{f"{self.name}/{name}": loss for name, loss in losses.items()}}


class Sources(StepCallback):
    """Logs each source's validation loss and tokens; checks that a resumed run keeps its past."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        self.config: Any = config  # its data are a mixture
        self.directory = directory
        self.every = config.log_every

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the module's validation loss."""
        data: TokenDataModule = trainer.datamodule
        order = self._order(trainer)
        shares = dict(zip(order.sizes, map(float, order.phases[-1].shares), strict=True))
        by_source = LossBySource(shares, [*map(len, data.eval_loaders("val", data.validated))])
        replace_mean(pl_module, by_source)

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

    def _order(self, trainer: Any) -> MixedOrder:
        """Return the order of the run."""
        data: TokenDataModule = trainer.datamodule
        sizes = data.windows["train"].counts
        planned = data.samples_seen(trainer.max_steps)
        order: MixedOrder = self.config.data.order(sizes, planned, data.block_size, data.seed)
        return order

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Record the rule by which the sources take turns."""
        checkpoint[TURNS] = RULE

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if a run in its own directory has settings with another past."""
        is_of_this_run = Path(trainer.ckpt_path).parent == self.directory.checkpoints
        if is_of_this_run and not self.config.resume_force:
            keep_past(checkpoint, self.config, trainer.datamodule.folder)

    def on_step_end(self, trainer: Any, pl_module: Any, step: int) -> None:
        """Log each source's tokens so far."""
        if step % self.every == 0 or step == trainer.max_steps:
            data: TokenDataModule = trainer.datamodule
            counts = self._order(trainer).counts(data.samples_seen(step)).items()
            tokens: dict[str, float]
            tokens = {f"data/tokens/{name}": count * data.block_size for name, count in counts}
            log_row(trainer.loggers, tokens, trainer.global_step)


def callbacks(
    config: Config, directory: RunDirectory, _rank: int, _terminal: Any
) -> list[Callback]:
    """Return the callback of a mixture."""
    chosen: list[Callback] = []
    if isinstance(config.data, Mixture):
        chosen.append(Sources(config, directory))
    return chosen
