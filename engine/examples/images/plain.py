"""Classify small images of shapes with a convolutional network."""

import argparse
import random
from collections.abc import Iterable
from itertools import pairwise

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

SHAPES = ("disk", "square", "cross", "ring")
SIZE = 24  # pixels per side


class Shapes(Dataset):
    """Images of one shape each, drawn when they are asked for: (1, SIZE, SIZE), and the label."""

    def __init__(self, first: int, count: int, augment: bool = False) -> None:
        self.first, self.count, self.augment = first, count, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        source = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(len(SHAPES), (), generator=source))
        x, y, radius = (torch.rand(3, generator=source) * 6 + torch.tensor([-3, -3, 5])).tolist()
        image = draw(SHAPES[label], x, y, radius)
        image += 0.5 * torch.randn(SIZE, SIZE, generator=source)
        if self.augment:
            image = augmented(image)
        return image[None], label


def draw(shape: str, x: float, y: float, radius: float) -> Tensor:
    """Return a shape around (x, y) from the center, 1 inside and 0 outside."""
    across = torch.arange(SIZE) - SIZE / 2
    dx, dy = (across[None] - x).abs(), (across[:, None] - y).abs()
    distance = (dx**2 + dy**2).sqrt()
    inside = {
        "disk": distance < radius,
        "square": (dx < radius * 0.9) & (dy < radius * 0.9),
        "cross": ((dx < 2) | (dy < 2)) & (dx < radius) & (dy < radius),
        "ring": (distance < radius) & (distance > radius - 3),
    }
    return inside[shape].float()


def augmented(image: Tensor) -> Tensor:
    """Return an image that is shifted, flipped, and brighter or darker, at random."""
    if random.random() < 0.5:
        image = image.flip(-1)
    shift = torch.randint(-2, 3, (2,)).tolist()
    return image.roll(shift, (0, 1)) * random.uniform(0.8, 1.2)


class Classifier(lightning.LightningModule):
    """A network of three convolutions, trained with a cosine schedule."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        widths = (1, 16, 32, 64)
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.ReLU())
            for a, b in pairwise(widths)
        ]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 4))
        self.accuracy = MulticlassAccuracy(len(SHAPES), average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels, label_smoothing=0.05)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.accuracy(logits, labels)
        self.log("val/accuracy", self.accuracy)
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Images(lightning.LightningDataModule):
    """4,000 images to train on, which two workers draw, and 400 to validate."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.train = Shapes(0, 4000, augment=True)
        self.val = Shapes(4000, 400)

    def train_dataloader(self) -> Iterable:
        return DataLoader(self.train, self.batch, shuffle=True, num_workers=2)

    def val_dataloader(self) -> Iterable:
        return DataLoader(self.val, self.batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    lightning.seed_everything(1)
    batch = 64
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.steps,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), Images(batch))
    trainer.print({name: value.item() for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
