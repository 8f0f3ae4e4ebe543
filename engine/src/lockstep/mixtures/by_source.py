"""What a run shows of each source: its loss, its tokens, its epochs, and its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning import LightningModule, Trainer

from lockstep.callbacks.step import StepCallback
from lockstep.errors import UserError
from lockstep.functional import perplexity
from lockstep.loggers.step_rows import log_row
from lockstep.metrics.mean import Entry, Mean, exact_mean, replace_mean
from lockstep.mixtures.mixed_order import MixedOrder
from lockstep.settings import check_whole
from lockstep.tokens.prepared import eval_loaders
from lockstep.tokens.shards import load_index

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
                    f"data.source.sources.{name}: no target of its validation windows counts, so "
                    "it has no loss; raise val_tokens, or its val_fraction"
                )
            losses[name] = exact_mean(entries)
        mean = sum(share * losses[name] for name, share in self.shares.items() if share)
        row = {self.name: mean, **{name: derive(mean) for name, derive in self.also.items()}}
        return {**row, **{f"{self.name}/{name}": loss for name, loss in losses.items()}}


class BySource(StepCallback):
    """Logs each source's validation loss and tokens; `val/loss` is their mean by share.

    Args:
        every: steps between rows of the tokens so far.

    Raises:
        UserError: when training begins, if the data are no mixture.
    """

    def __init__(self, every: int = 10) -> None:
        check_whole("every", every, at_least=1)
        self.every = every

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace the module's validation loss."""
        super().setup(trainer, pl_module, stage)
        data = _data_of(trainer)
        windows = data.windows["val"]
        loaders = eval_loaders(windows, data.validated, data.batch, trainer).loaders
        shares = shares_of(data.order)
        replace_mean(pl_module, LossBySource(shares, [*map(len, loaders)]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the receipt, and warn of sources that are repeated often or hardly used."""
        super().on_train_start(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        data = _data_of(trainer)
        order = data.order
        samples = data.planned_samples
        for label, line in lines_of(
            order, samples, load_index(data.prepared.folder).settings["sources"]
        ):
            logger.info("  %s  %s", label, line)
        counts = order.counts(samples)
        for name, epochs in order.epochs(samples).items():
            if epochs > EPOCHS:
                logger.warning(
                    "the run takes data.source.sources.%s %s times; beyond %d epochs the same "
                    "tokens teach less and less (Muennighoff et al. 2023): lower its share, or add "
                    "text to it",
                    name,
                    times(epochs),
                    EPOCHS,
                )
            elif counts[name] == 0:
                logger.warning(
                    "the run takes nothing from data.source.sources.%s: its share of %s windows is "
                    "less than one; raise its weight or its epochs, or train longer",
                    name,
                    f"{samples:,}",
                )
            elif data.source.epochs.get(name, 0) >= 1 and epochs < 1:  # asked for, and not had
                logger.warning(
                    "the run takes %s of %s windows of data.source.sources.%s, less than once; "
                    "data.source.epochs.%s counts over data.source.planned_tokens or, without "
                    "weights, relative to the other epochs",
                    f"{counts[name]:,}",
                    f"{order.sizes[name]:,}",
                    name,
                    name,
                )

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Log each source's tokens so far."""
        if step % self.every == 0 or step == trainer.max_steps:
            loader: Any = trainer.train_dataloader
            counts = loader.order.counts(loader.samples_seen(step)).items()
            size = _data_of(trainer).tokens_per_sample
            tokens: dict[str, float] = {
                f"data/tokens/{name}": count * size for name, count in counts
            }
            log_row(trainer.loggers, tokens, trainer.global_step)


def _data_of(trainer: Any) -> Any:
    """Return the data module of a Trainer, or raise a `UserError` if its data are no mixture."""
    data = trainer.datamodule
    if not isinstance(getattr(data, "order", None), MixedOrder):
        raise UserError("callbacks=sources is for data=mixture; leave it out")
    return data


def shares_of(order: MixedOrder) -> dict[str, float]:
    """Return the shares of the last phase, by the names of the sources."""
    return dict(zip(order.sizes, map(float, order.phases[-1].shares), strict=True))


def lines_of(
    order: MixedOrder, samples: int, states: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield what the receipt says of the sources: shares, epochs, prepared folders, and changes.

    Args:
        order: of the run.
        samples: training windows of the whole run.
        states: the name of each source's prepared folder.
    """
    epochs = order.epochs(samples)
    first, *later = order.phases
    shares = [
        f"{name} {float(share):.4g} = {times(epochs[name])} epochs of {states[name]}"
        for name, share in zip(order.sizes, first.shares, strict=True)
    ]
    yield "mixture", ", ".join(shares)
    for phase in later:
        pairs = zip(order.sizes, phase.shares, strict=True)
        known = ", ".join(f"{name} {float(share):.4g}" for name, share in pairs)
        yield "later", f"from sample {phase.start:,}: {known}"


def times(epochs: float) -> str:
    """Return the number of epochs to two digits, or whole from 100 on."""
    return f"{epochs:,.0f}" if epochs >= 99.5 else f"{epochs:.2g}"
