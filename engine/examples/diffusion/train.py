"""Train a small diffusion model of points on a spiral, and draw new ones from its averaged weights.

The model predicts the noise in a noisy point (Ho et al. 2020), with a cosine schedule (Nichol and
Dhariwal 2021).
"""

import argparse
import math
from collections.abc import Iterable

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

STEPS = 100  # of noise


def spiral(count: int, seed: int) -> Tensor:
    """Return points on a spiral: (count, 2)."""
    source = torch.Generator().manual_seed(seed)
    angle = 3 * math.pi * torch.rand(count, generator=source).sqrt()
    points = torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 5
    return points + 0.03 * torch.randn(count, 2, generator=source)


class Diffusion(lightning.LightningModule):
    """A network that sees a point and how noisy it is."""

    def __init__(self, lr: float = 2e-3, width: int = 128) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(2 + 16, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 2),
        )
        self.train_loss = lockstep.Mean("train/loss")
        place = torch.arange(STEPS + 1) / STEPS
        kept = torch.cos((place + 0.008) / 1.008 * math.pi / 2) ** 2
        self.register_buffer("kept", kept / kept[0])  # the share of the signal at each step

    def forward(self, points: Tensor, step: Tensor) -> Tensor:
        """Return the noise in points (N, 2) at steps (N,)."""
        waves = step[:, None] / STEPS * math.pi * 2.0 ** torch.arange(8, device=step.device)
        return self.net(torch.cat([points, waves.sin(), waves.cos()], 1))

    def loss(self, points: Tensor) -> Tensor:
        """Return the mean squared error of the noise that was added at a random step."""
        step = torch.randint(1, STEPS + 1, (len(points),), device=self.device)
        noise = torch.randn_like(points)
        kept = self.kept[step][:, None]
        return F.mse_loss(self(kept.sqrt() * points + (1 - kept).sqrt() * noise, step), noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (points,) = batch
        loss = self.loss(points)
        self.train_loss.update(loss, weight=len(points))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Return new points: (count, 2)."""
        points = torch.randn(count, 2)
        for step in range(STEPS, 0, -1):
            before, after = self.kept[step], self.kept[step - 1]
            noise = self(points, torch.full((count,), step))
            rate = (1 - before / after).clamp(max=0.999)
            points = (points - rate / (1 - before).sqrt() * noise) / (1 - rate).sqrt()
            if step > 1:
                points += ((1 - after) / (1 - before) * rate).sqrt() * torch.randn(count, 2)
        return points


class Points(lightning.LightningDataModule):
    """8,192 points."""

    def __init__(self, batch: lockstep.Batch) -> None:
        super().__init__()
        self.batch = batch
        self.train = TensorDataset(spiral(8192, seed=0))

    def train_dataloader(self) -> Iterable:
        return lockstep.train_loader(self.train, self.batch, self.trainer, seed=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    lightning.seed_everything(1)
    batch = lockstep.Batch(global_size=256, exact_micro_size=64).spread_over(options.devices)
    average = EMAWeightAveraging(decay=0.99)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=lockstep.DDP(batch),
        accumulate_grad_batches=batch.accumulation,
        callbacks=[lockstep.MicroBatchSeeds(1), lockstep.Metrics(batch, every=10), average],
        max_steps=options.steps,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    module = Diffusion()
    trainer.fit(module, Points(batch))
    trainer.print({name: value.item() for name, value in trainer.callback_metrics.items()})
    real, drawn = spiral(1000, seed=1), module.sample(1000)
    trainer.print("from a drawn point to the nearest real one:", nearest(drawn, real))


def nearest(points: Tensor, others: Tensor) -> float:
    """Return the mean distance from points to the nearest one of others."""
    return torch.cdist(points, others).amin(1).mean().item()


if __name__ == "__main__":
    main()
