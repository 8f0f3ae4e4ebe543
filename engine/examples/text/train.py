"""Fine-tune a model of transformers that tells whether a review is good or bad.

Nothing is downloaded: the model has random weights, and the reviews are made up. For a real one,
use `AutoModelForSequenceClassification.from_pretrained`, its tokenizer, and your dataset.
"""

import argparse
import random
from collections.abc import Iterable

import lightning
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryF1Score
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    get_cosine_schedule_with_warmup,
)

import lockstep

GOOD = ["great", "lovely", "superb", "moving", "clever"]
BAD = ["dull", "awful", "weak", "tiresome", "clumsy"]
OTHER = ["the", "a", "film", "plot", "cast", "music", "and", "was", "story", "very", "of", "scene"]
WORDS = ["[pad]", "[start]", "not", *GOOD, *BAD, *OTHER]
Sample = dict[str, Tensor]


class Reviews(Dataset):
    """Reviews of 5 to 30 words; "not" before a word turns its meaning round."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        source = random.Random(self.first + index)
        words = source.choices(OTHER, k=source.randint(5, 30))
        is_good, is_negated = source.random() < 0.5, source.random() < 0.3
        word = source.choice(GOOD if is_good != is_negated else BAD)
        place = source.randrange(len(words))
        words[place:place] = ["not", word] if is_negated else [word]
        tokens = torch.tensor([WORDS.index(word) for word in ("[start]", *words)])
        return {"input_ids": tokens, "labels": torch.tensor(int(is_good))}


def padded(samples: list[Sample]) -> Sample:
    """Return a batch of samples that are as long as the longest one."""
    tokens = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.stack([sample["labels"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


class Tuned(lightning.LightningModule):
    """A small BERT with a head for two classes."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
        )
        self.model = AutoModelForSequenceClassification.from_config(config)
        self.train_loss = lockstep.Mean("train/loss")
        self.val_loss = lockstep.Mean("val/loss")
        self.f1 = BinaryF1Score()

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.train_loss.update(loss, weight=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        answer = self.model(**batch)
        self.f1(answer.logits.argmax(-1), batch["labels"])
        self.log("val/f1", self.f1)
        self.val_loss.update(answer.loss, weight=len(batch["labels"]))

    def configure_optimizers(self) -> dict:
        decayed = [weight for weight in self.parameters() if weight.ndim > 1]
        others = [weight for weight in self.parameters() if weight.ndim < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, self.lr, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Data(lightning.LightningDataModule):
    """6,000 reviews to train on, and 500 to validate."""

    def __init__(self, batch: lockstep.Batch) -> None:
        super().__init__()
        self.batch = batch
        self.train, self.val = Reviews(0, 6000), Reviews(6000, 500)

    def train_dataloader(self) -> Iterable:
        return lockstep.train_loader(self.train, self.batch, self.trainer, seed=1, collate=padded)

    def val_dataloader(self) -> Iterable:
        return lockstep.eval_loader(self.val, self.batch, self.trainer, collate=padded)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    lightning.seed_everything(1)
    batch = lockstep.Batch(global_size=32, exact_micro_size=8).spread_over(options.devices)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=lockstep.DDP(batch),
        accumulate_grad_batches=batch.accumulation,
        callbacks=[lockstep.MicroBatchSeeds(1), lockstep.Metrics(batch, every=10)],
        max_steps=options.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Tuned(), Data(batch))
    trainer.print({name: value.item() for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
