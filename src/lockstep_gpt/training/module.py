"""The LightningModule: what one micro-batch, one update, and one validation do."""

from collections.abc import Callable
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Self, cast

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep_gpt.config import Config, as_values, from_container
from lockstep_gpt.data.datamodule import TokenDataModule, data_place
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.data.tokenizer_choice import from_dict
from lockstep_gpt.data.windows import Batch
from lockstep_gpt.distributed.ddp import arrange_buckets, can_keep_gradients
from lockstep_gpt.distributed.strategies import ModelLayout, WholeModels, layout_of
from lockstep_gpt.model.functional import perplexity
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.registry import MODEL, additions
from lockstep_gpt.run.checkpoint import find_checkpoint, read_checkpoint
from lockstep_gpt.run.directory import literal, refuse_another_identity
from lockstep_gpt.run.resuming import (
    apply_settings,
    refuse_lost_numbers,
    refuse_lost_parts,
    refuse_other_weights,
    rescale_batch_progress,
)
from lockstep_gpt.training.optim import (
    build_optimizer,
    copy_restored_state,
    place_matrices,
)
from lockstep_gpt.training.schedule import Schedule, plan_batch, plan_schedule
from lockstep_gpt.training.seeds import leaf_seed, seed_device
from lockstep_gpt.training.skipped_updates import SkippedUpdates
from lockstep_gpt.training.step_losses import StepLosses
from lockstep_gpt.training.token_loss import TokenLoss


class GPTModule(lightning.LightningModule):
    """Trains `model`; keeps its metrics on the device until callbacks read them.

    In a notebook, load the module of a run. Its `model` is a plain `nn.Module`:

        module = GPTModule.load_from_checkpoint("runs/first")
        tokens = torch.tensor([module.tokenizer.encode("def f(").tolist()])  # (1, T)
        module.tokenizer.decode(module.model.generate(tokens, 100)[0].tolist())

    Args:
        config: the settings of a whole run.
        schedule: the learning rate of each step; `plan_schedule` makes it from `config`.
        tokenizer: decides the vocabulary, and is saved with the weights.
    """

    def __init__(self, config: Config, schedule: Schedule, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config = config
        self.schedule = schedule
        self.tokenizer = tokenizer
        self.model = build_gpt(config.model, tokenizer.vocab_size)
        for transform in additions(MODEL):
            transform(self.model, config, tokenizer)  # the module keeps what it adds
        if config.precision == "64-true":
            self.model.double()  # the Trainer would only do so after loading a checkpoint's weights
        self.losses = StepLosses()
        self.token_loss = TokenLoss()
        self.test_loss = TokenLoss()
        self.val_loss: float | None = None
        self.grad_norm: Tensor | None = None  # of the last update, before clipping
        self.skipped = SkippedUpdates(config.guard.max_skipped)
        self.leaf = 0  # index of the micro-batch among those of a step on this rank
        self.loss_factor = 1.0  # scales the loss in backward, in addition to Lightning's own
        self.layout: ModelLayout = WholeModels()  # until the strategy is known
        self.saved_weights: dict[str, Tensor] = {}  # the names and whole shapes in checkpoints
        self.trained: list[nn.Parameter] = []  # cached: walking all modules costs time in each step
        self.keeps_gradients = False  # in DDP's buckets, where micro-batches are added to them
        self._is_placed = False
        self._gives_features = "with_features" in signature(self.model.forward).parameters
        self.logs_losses = True  # to any Trainer's loggers; in our runs `Metrics` does this

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", **_: Any
    ) -> Self:
        """Load the module from a checkpoint or run directory, or raise a `UserError`."""
        path = find_checkpoint(Path(checkpoint_path))
        # Another Trainer writes no checksum.
        content = read_checkpoint(path, map_location, needs_sum=False)
        config = from_container(literal(content["config"]), path)
        batch = plan_batch(config.batch, config.model.block_size, 1, 1)
        module = cls(config, plan_schedule(config, batch), from_dict(content["tokenizer"]))
        module.load_state_dict(content["state_dict"])
        return module

    def configure_model(self) -> None:
        """Place the model on the ranks, and compile it; there is no optimizer yet."""
        self.layout = layout_of(self.trainer.strategy)
        if self._is_placed:  # a test after training uses the same ranks
            return
        self._is_placed = True
        self.saved_weights = {name: weight.to("meta") for name, weight in self.state_dict().items()}
        self.layout.place_model(self.model, self.config.compile)

    def on_train_start(self) -> None:
        """Prepare the first step, once the strategy has put everything in place."""
        self.skipped.count = self.skipped.count.to(self.device)
        self.losses.move_to(self.device)
        self.losses.copies = self.trainer.world_size // data_place(self.trainer).size
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        data: Any = getattr(self.trainer, "datamodule", None)  # a user may pass loaders instead
        if data:
            self._arrange_buckets(getattr(data, "micro_size", 1))

    def _arrange_buckets(self, micro_size: int) -> None:
        """Prepare DDP's buckets for restarts on three or more ranks, and for accumulation.

        Without accumulation, keeping gradients saves nothing: DDP moves each into its bucket as it
        arrives. Exact sums keep those of each micro-batch themselves.
        """
        accumulates = self.trainer.accumulate_grad_batches > 1
        if accumulates or self.trainer.world_size > 2:
            shape = (micro_size, self.config.model.block_size)
            tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
            is_exact = self.config.batch.exact_micro_size is not None
            keep = accumulates and not is_exact and can_keep_gradients(self.trainer.strategy)
            batch = (tokens, tokens.clone())  # a compiled model would be compiled again for others
            logs_losses = self.logs_losses
            self.logs_losses = False  # these are of no step
            self.keeps_gradients = arrange_buckets(self.trainer.strategy, self.model, batch, keep)
            self.logs_losses = logs_losses
            self.losses.forget_step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make dropout depend only on seed, step, and micro-batch, not on the rank.

        Ranks that split the model also draw the same noise for their common residual stream.
        """
        accumulation = self.trainer.accumulate_grad_batches
        self.leaf = batch_idx % accumulation
        leaf = data_place(self.trainer).rank * accumulation + self.leaf
        seed_device(leaf_seed(self.config.seed, self.trainer.global_step, leaf), self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch of tokens and targets, each (B, T)."""
        loss: Tensor = self.model(*batch)
        if self.logs_losses:
            self.log("train/loss", loss.detach(), prog_bar=True)
        self.losses.add(self.leaf, loss)
        return loss

    def backward(self, loss: Tensor, *arguments: Any, **settings: Any) -> None:
        """Compute the gradients of one micro-batch."""
        if self.loss_factor != 1:
            loss = loss * self.loss_factor
        super().backward(loss, *arguments, **settings)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Add one micro-batch to the validation loss; targets in padding rows don't count.

        Returns what metrics need without another forward pass: `loss`, `targets`, (B, T), and
        `features`, (B, T, C), of which `model.logits` makes logits, if the model gives them.
        """
        return self._measure(batch, self.token_loss)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Add one micro-batch to the test loss; returns the same as `validation_step`."""
        return self._measure(batch, self.test_loss)

    def _measure(self, batch: Batch, token_loss: TokenLoss) -> dict[str, Tensor]:
        tokens, targets = batch
        if not self._gives_features:  # a user's model with a `forward` of its own
            loss = self.model(tokens, targets)
            token_loss.update(loss, targets)
            return {"loss": loss, "targets": targets}
        loss, features = self.model(tokens, targets, with_features=True)
        token_loss.update(loss, targets)
        return {"loss": loss, "targets": targets, "features": features}

    def on_validation_epoch_end(self) -> None:
        """Reduce the validation loss over all ranks, also for callbacks that monitor it."""
        self.val_loss = float(self.token_loss.compute())
        self.token_loss.reset()
        self._log_loss("val", self.val_loss, logger=None if self.logs_losses else False)

    def on_test_epoch_end(self) -> None:
        """Reduce the test loss over all ranks."""
        loss = float(self.test_loss.compute())
        self.test_loss.reset()
        self._log_loss("test", loss, logger=None)  # as Lightning does; `Trainer.test` returns it

    def _log_loss(self, split: str, loss: float, *, logger: bool | None) -> None:
        metrics = {f"{split}/loss": loss, f"{split}/perplexity": perplexity(loss)}
        # All ranks have the same values, and their maximum is this value without rounding.
        self.log_dict(metrics, logger=logger, sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer, and its schedule as a function of the step."""
        optimizer = build_optimizer(
            self.model,
            self.config.optim,
            self.schedule.peak_lr,
            fused=self.config.precision != "16-mixed",  # fused kernels unscale after our clipping
        )
        place_matrices(optimizer, self.layout, self.config)
        optimizer.register_load_state_dict_post_hook(copy_restored_state)
        scheduler = LambdaLR(optimizer, self.schedule.factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Update the weights, then free the gradients; Lightning would do so before backward.

        So no forward pass needs memory for them, unless they are DDP's buckets.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.losses.complete_step()
        if not self.keeps_gradients:
            optimizer.zero_grad()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Before the first micro-batch of a step, zero gradients in their buckets, or free them."""
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation; in buckets, they take no memory of their own."""
        if not self.keeps_gradients:
            super().on_validation_model_zero_grad()

    def on_train_end(self) -> None:
        """Free the gradients also in buckets, which would outlive DDP."""
        self.keeps_gradients = False
        self.model.zero_grad()

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """What `as_values` returns for this run, whose states all have it."""
        return as_values(self.config)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the next row of the log needs, and config and tokenizer unless already there.

        Every rank must call this.
        """
        checkpoint["skipped"] = int(self.skipped.count)
        checkpoint["step_losses"] = self.losses.state()
        checkpoint.setdefault("config", self.config_values)
        checkpoint.setdefault("tokenizer", self.tokenizer.to_dict())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue at the saved sample, with this run's own accumulation and free settings.

        Raise a `UserError` if the checkpoint is from a run with other settings or code.
        """
        where = f"checkpoint {self.trainer.ckpt_path}"
        data = getattr(self.trainer, "datamodule", None)
        refuse_lost_parts(where, checkpoint, isinstance(data, TokenDataModule))
        if not self.config.resume_force:
            refuse_another_identity(where, checkpoint["config"], as_values(self.config))
        refuse_other_weights(where, checkpoint["state_dict"], self.saved_weights)
        refuse_lost_numbers(where, checkpoint["state_dict"], self)
        if isinstance(data, TokenDataModule):
            data.resume_at(checkpoint["global_step"], checkpoint["samples"])
        self.skipped.count.fill_(checkpoint.get("skipped", 0))
        accumulation = self.trainer.accumulate_grad_batches
        losses = checkpoint.get("step_losses")  # None: of an earlier version
        if losses is not None:
            self.losses.load(losses, *data_place(self.trainer), accumulation)
        rescale_batch_progress(checkpoint, self.trainer)
        optimizer = cast(dict[str, Any], self.configure_optimizers())["optimizer"]
        apply_settings(checkpoint, optimizer, self.schedule.factor(checkpoint["global_step"]))

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **_settings: Any) -> None:
        """Clip the norm of all gradients, already averaged over ranks, and keep it for the log.

        Lightning's own clipping doesn't keep it, and rejects fused optimizers in mixed precision.
        """
        norm = self.layout.gradient_norm(self.trained)
        if self.config.optim.clip_norm is not None:
            clip_grads_with_norm_(self.trained, self.config.optim.clip_norm, norm)
        self.grad_norm = self.layout.whole_norm(norm)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.skipped.skip_unless_finite(optimizer, self.grad_norm, scaler)
