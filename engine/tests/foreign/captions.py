"""Captions of images: augmented images, padded texts of any length, and a loss over real tokens."""

import random

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lockstep.loading.loaders import eval_loader, train_loader

VOCABULARY = 24
PAD = 0
START = 1


class Pictures(Dataset):
    """Small images; each has a caption of 3 to 9 tokens."""

    def __init__(self, first: int, count: int, augment: bool):
        self.first = first
        self.count = count
        self.augment = augment

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        source = np.random.default_rng(self.first + i)
        image = torch.from_numpy(source.normal(size=(3, 10, 10)))
        length = int(source.integers(3, 10))
        caption = torch.from_numpy(source.integers(START + 1, VOCABULARY, length))
        top, left = 1, 1
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            top, left = random.randint(0, 2), np.random.randint(3)  # noqa: NPY002
        image = image[:, top : top + 8, left : left + 8]
        return image.to(torch.get_default_dtype()), caption


def collate(samples):
    """Return images (B, 3, 8, 8), padded captions (B, T), and lengths (B,)."""
    images, captions = zip(*samples, strict=True)
    lengths = torch.tensor([len(caption) for caption in captions])
    padded = pad_sequence(captions, batch_first=True, padding_value=PAD)
    return torch.stack(images), padded, lengths


def count_tokens(batch):
    """Return how many tokens of a batch are real."""
    return batch[2].sum()


class Album(lightning.LightningDataModule):
    def __init__(self, batch, seed: int, workers: int = 0):
        super().__init__()
        self.batch = batch
        self.seed = seed
        self.workers = workers

    def train_dataloader(self):
        return train_loader(
            Pictures(0, 120, augment=True),
            self.batch,
            self.trainer,
            seed=self.seed,
            collate=collate,
            workers=self.workers,
        )

    def val_dataloader(self):
        return eval_loader(
            Pictures(120, 48, augment=False),
            self.batch,
            self.trainer,
            collate=collate,
            workers=self.workers,
        )


class Captioner(lightning.LightningModule):
    def __init__(self, lr: float = 3e-3, width: int = 24, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(9 * width, width)
        )
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, VOCABULARY)
        )

    def forward(self, images, captions):
        start = torch.full_like(captions[:, :1], START)
        x = self.embedding(torch.cat([start, captions[:, :-1]], 1))
        hidden, _ = self.decoder(x, self.encoder(images)[None])
        return self.head(hidden)

    def loss(self, batch):
        """Return the mean over the real tokens, and their number."""
        images, captions, lengths = batch
        each = F.cross_entropy(self(images, captions).transpose(1, 2), captions, reduction="none")
        is_real = torch.arange(captions.shape[1], device=lengths.device) < lengths[:, None]
        return (each * is_real).sum() / is_real.sum(), int(lengths.sum())

    def training_step(self, batch, batch_idx):
        loss, tokens = self.loss(batch)
        self.log(
            "train/loss", loss, on_step=False, on_epoch=True, batch_size=tokens, sync_dist=True
        )
        return loss

    def validation_step(self, batch, batch_idx):
        loss, tokens = self.loss(batch)
        self.log("val/loss", loss, batch_size=tokens, sync_dist=True)

    def configure_optimizers(self):
        weights = [*self.parameters()]
        groups = [
            {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.1},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
