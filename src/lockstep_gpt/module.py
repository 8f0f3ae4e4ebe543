"""The experiment's step: what a micro-batch, a validation, and the optimizer do. Yours to edit."""

from collections.abc import Callable
from functools import partial

import lockstep
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lockstep.functional import IGNORE, perplexity
from lockstep.settings import check
from torch import Tensor
from torch.optim import Optimizer

from lockstep_gpt.language_model import LanguageModel

Batch = tuple[Tensor, Tensor]  # tokens and targets, (B, T)


class GPTModule(LightningModule):
    """Plain Lightning; each `lockstep.Mean` is logged, exactly, over all ranks.

    Args:
        model: returns a model of a `vocab_size`, which returns the mean loss of tokens and targets.
        optimizer: returns the optimizer of named weights with a rate `lr`, as those in optim.py.
        schedule: the learning rate over the run.
        vocab_size: of the data's tokens.
        compiled: whether torch compiles the model.
    """

    def __init__(
        self,
        model: Callable[..., LanguageModel],
        optimizer: Callable[..., Optimizer],
        schedule: lockstep.Schedule,
        vocab_size: int,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        given = getattr(model, "keywords", {}).get("vocab_size", vocab_size)
        check(
            "model.vocab_size",
            given,
            given == vocab_size,
            f"must be the data's {vocab_size}; leave it out",
        )
        self.new_model = partial(model, vocab_size=vocab_size)
        self.model = self.new_model()
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.compiled = compiled
        self.train_loss = lockstep.Mean("train/loss")
        self.val_loss = lockstep.Mean("val/loss", also={"val/perplexity": perplexity})
        self.test_loss = lockstep.Mean("test/loss", also={"test/perplexity": perplexity})

    @property
    def flops_per_token(self) -> int:
        """Operations per token in forward and backward, for the utilization of GPUs."""
        return self.model.flops_per_token

    def setup(self, stage: str) -> None:
        """Train with the fastest library of float32 matrix products that is exact enough."""
        if stage == "fit":
            lockstep.choose_matrix_products(self.trainer.strategy.root_device.type)

    def configure_model(self) -> None:
        """Compile the model, or shard its blocks, as the strategy does it."""
        lockstep.place(self.model, self.trainer.strategy, compiled=self.compiled)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch."""
        return self._loss(batch, self.train_loss)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add one micro-batch to the validation loss; padding rows don't count."""
        return self._loss(batch, self.val_loss)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add one micro-batch to the test loss."""
        return self._loss(batch, self.test_loss)

    def _loss(self, batch: Batch, mean: lockstep.Mean) -> Tensor:
        tokens, targets = batch
        loss: Tensor = self.model(tokens, targets)
        mean.update(loss, weight=count_targets(batch))
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, and its rate as a function of the step."""
        optimizer = self.make_optimizer(self.model.named_parameters(), lr=self.schedule.peak)
        rate = lockstep.StepRate(optimizer, self.schedule.factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": rate, "interval": "step"},
        }


def count_targets(batch: Batch) -> Tensor:
    """Return how many targets of a micro-batch count."""
    _, targets = batch
    return (targets != IGNORE).sum()
