"""The LightningModule: what one micro-batch, one update, and one validation do."""

from collections.abc import Callable, Iterable

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep_gpt.distributed.strategies import place
from lockstep_gpt.model.functional import IGNORE, perplexity
from lockstep_gpt.model.language_model import LanguageModel
from lockstep_gpt.run.means import Mean
from lockstep_gpt.training.step_rate import StepRate

Batch = tuple[Tensor, Tensor]  # tokens and targets, (B, T)


class GPTModule(LightningModule):
    """Plain Lightning; each `Mean` is logged, exactly, over all ranks.

    Args:
        model: returns the mean loss of tokens and targets.
        optimizer: returns the optimizer of named weights, such as a partial of `muon`.
        rate: of a step, relative to the optimizer's.
        compiled: whether torch compiles the model.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer],
        rate: Callable[[int], float],
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer
        self.rate = rate
        self.compiled = compiled
        self.train_loss = Mean("train/loss")
        self.val_loss = Mean("val/loss", also={"val/perplexity": perplexity})
        self.test_loss = Mean("test/loss", also={"test/perplexity": perplexity})

    @property
    def flops_per_token(self) -> int:
        """Operations of the forward and backward pass, for `lockstep.Metrics`."""
        return self.model.flops_per_token

    def configure_model(self) -> None:
        """Compile the model, or shard its blocks, as the strategy does it."""
        place(self.model, self.trainer.strategy, compiled=self.compiled)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch."""
        return self._loss(batch, self.train_loss)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add one micro-batch to the validation loss; padding rows don't count."""
        return self._loss(batch, self.val_loss)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add one micro-batch to the test loss."""
        return self._loss(batch, self.test_loss)

    def _loss(self, batch: Batch, mean: Mean) -> Tensor:
        tokens, targets = batch
        loss: Tensor = self.model(tokens, targets)
        mean.update(loss, weight=(targets != IGNORE).sum())
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, and its rate as a function of the step."""
        optimizer = self.make_optimizer(self.model.named_parameters())
        scheduler = StepRate(optimizer, self.rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
