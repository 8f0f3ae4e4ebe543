"""A classifier of points, with metrics of torchmetrics and a rate that follows the validation."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep.loading.loaders import eval_loader, train_loader

CLASSES = 4


class Classifier(lightning.LightningModule):
    def __init__(self, lr: float = 0.01, dropout: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)
        )
        self.train_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.val_acc(logits, y)
        self.log("val/loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val/acc", self.val_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.5
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"},
        }


class Points(lightning.LightningDataModule):
    def __init__(self, batch, workers: int = 0):
        super().__init__()
        self.batch = batch
        self.workers = workers

    def setup(self, stage):
        source = torch.Generator().manual_seed(0)
        y = torch.randint(CLASSES, (168,), generator=source)
        x = torch.randn(168, 8, generator=source) + F.one_hot(y, 8)
        x = x.to(torch.get_default_dtype())
        self.train = TensorDataset(x[:120], y[:120])
        self.val = TensorDataset(x[120:], y[120:])

    def train_dataloader(self):
        return train_loader(self.train, self.batch, self.trainer, seed=1, workers=self.workers)

    def val_dataloader(self):
        return eval_loader(self.val, self.batch, self.trainer, workers=self.workers)
