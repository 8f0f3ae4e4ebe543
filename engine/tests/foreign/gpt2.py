"""GPT-2 of transformers, trained with its own loss on batches that are dicts."""

import lightning
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.loading.loaders import eval_loader, train_loader

VOCABULARY = 32
LENGTH = 12


class Counting(Dataset):
    """Numbers that go up by a step, modulo the vocabulary."""

    def __init__(self, first: int, count: int):
        self.first = first
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        number = self.first + i
        ids = (number + (1 + number % 5) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Numbers(lightning.LightningDataModule):
    def __init__(self, batch, workers: int = 0):
        super().__init__()
        self.batch = batch
        self.workers = workers

    def train_dataloader(self):
        rows = Counting(0, 120)
        return train_loader(rows, self.batch, self.trainer, seed=3, workers=self.workers)

    def val_dataloader(self):
        rows = Counting(120, 48)
        return eval_loader(rows, self.batch, self.trainer, workers=self.workers)


class Finetune(lightning.LightningModule):
    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
