"""Faults that an owner's code may have, as callbacks and a data module that runs can name."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class SeedsByRank(lightning.Callback):
    """Defeats the seeds of micro-batches, as `seed_everything(seed + rank)` would."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.manual_seed(trainer.global_step + trainer.global_rank)


class OwnNoise(lightning.Callback):
    """Adds noise to logits from a generator of its own, whose seed is the rank."""

    def on_train_start(self, trainer, pl_module):
        random = torch.Generator().manual_seed(trainer.global_rank)

        def add_noise(_module, _inputs, output):
            return output + torch.randn(output.shape, generator=random)

        pl_module.model.blocks[0].register_forward_hook(add_noise)


class WithBatchNorm(lightning.Callback):
    """Normalizes over the samples of a micro-batch, after the last block."""

    def setup(self, trainer, pl_module, stage):
        pl_module.model.final_norm = nn.Sequential(pl_module.model.final_norm, Channels())


class Channels(nn.BatchNorm1d):
    """BatchNorm of (B, T, C)."""

    def __init__(self):
        super().__init__(32, dtype=torch.get_default_dtype())

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class LogsByRank(lightning.Callback):
    """Logs the loss of one rank's micro-batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("train/own", outputs["loss"])


class RateByRank(lightning.Callback):
    """Doubles the rate of the ranks after the first one, from step 3 on."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_rank and trainer.global_step >= 2:
            for group in optimizer.param_groups:
                group["lr"] *= 2


class UpdateByRank(lightning.Callback):
    """Changes a weight after the update, by another amount on each rank."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            with torch.no_grad():
                next(pl_module.parameters()).mul_(1 + 0.1 * trainer.global_rank)


class Forgets(lightning.Callback):
    """Scales gradients by a number of steps that no checkpoint keeps."""

    steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for weight in pl_module.parameters():
            weight.grad.mul_(self.steps)


class LogsSinceStart(lightning.Callback):
    """Logs a number of steps that no checkpoint keeps."""

    steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("train/steps", float(self.steps), sync_dist=True)


class Raises(lightning.Callback):
    """Fails in the third step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            raise ValueError("planted")


class Shuffled(Sampler):
    """Each rank shuffles all samples with its own seed, as a `DataLoader(shuffle=True)` may."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __len__(self):
        return 64

    def __iter__(self):
        random = torch.Generator().manual_seed(self.trainer.global_rank)
        return iter(torch.randperm(64, generator=random).tolist())


class DataByRank(lightning.LightningDataModule):
    """Tokens and targets, of which each rank takes an order of its own."""

    vocab_size = 256

    def __init__(self, block_size, batch):
        super().__init__()
        self.micro_size = batch.micro_size
        rows = torch.randint(256, (64, block_size + 1), generator=torch.Generator().manual_seed(0))
        self.samples = TensorDataset(rows[:, :-1], rows[:, 1:])

    def train_dataloader(self):
        return DataLoader(self.samples, self.micro_size, sampler=Shuffled(self.trainer))

    def val_dataloader(self):
        return DataLoader(self.samples, self.micro_size)
