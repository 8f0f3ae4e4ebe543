"""The LightningDataModule: the batches of prepared tokens."""

from dataclasses import replace
from typing import Any

import lockstep
import torch
from lightning import LightningDataModule
from lockstep.loading.loaders import (
    Joined,
    TrainLoader,
    past_of,
    refuse_other_past,
    samples_of_run,
)
from lockstep.tokens import Batch, Packing, Prepared, Source, Stored, move_to_device


class Tokens(LightningDataModule):
    """Plain Lightning; the source's tokens are prepared once, in a folder on disk.

    In a notebook, without a run and a Trainer:

        >>> from lockstep.tokens import Text, read_windows
        >>> data = Tokens(Text(path="corpus.txt"), block_size=64, batch=8, seed=0)
        >>> tokens, targets = read_windows(data.windows["val"], range(8))
        >>> tokens.shape
        torch.Size([8, 64])

    Args:
        source: of the text, or of tokens.
        block_size: tokens of a sample, T.
        batch: the samples of a micro-batch, or what has a `micro_size`.
        seed: decides the order of the training windows.
        val_tokens: most tokens to validate on, in whole windows, at least one; None: all.
        packing: how tokens fill windows; None: each continues where the one before it ends.
        root: folder for prepared tokens.
        fingerprint: that the tokens must have; None: those of the run, or of the current text.
        run: decides once which tokens these are; None: there is none.
    """

    def __init__(
        self,
        source: Source,
        block_size: int,
        batch: lockstep.Batch | int,
        seed: int,
        val_tokens: int | None = None,
        packing: Packing | None = None,
        root: str = "data",
        fingerprint: str | None = None,
        run: lockstep.Run | None = None,
    ) -> None:
        super().__init__()
        self.source = replace(source, root=root, fingerprint=fingerprint)
        self.prepared = Prepared(self.source, block_size, packing, run)
        self.windows = self.prepared.windows
        self.validated = self.prepared.to_validate(val_tokens)
        self.may_ignore = self.windows["train"].has_padding  # whether some targets don't count
        self.tokenizer = self.prepared.tokenizer
        self.vocab_size = self.tokenizer.vocab_size
        self.tokens_per_sample = block_size
        self.batch = batch
        self.seed = seed
        self.force = run is not None and run.force

    def train_dataloader(self) -> TrainLoader:
        """Return endless batches, starting at the Trainer's current step."""
        windows = self.windows["train"]
        return lockstep.train_loader(
            windows,
            self.batch,
            self.trainer,
            seed=self.seed,
            order=self.order,
            collate=windows.collate,
            workers="thread",
            endless=True,
        )

    @property
    def planned_samples(self) -> int:
        """The training windows of the whole run."""
        return samples_of_run(self.trainer, self.batch)

    @property
    def order(self) -> lockstep.Order:
        """Which training window each position of the run takes."""
        counts = self.windows["train"].counts
        return self.source.order(counts, self.planned_samples, self.tokens_per_sample, self.seed)

    def val_dataloader(self) -> Joined:
        """Return batches that contain every validation window once across all ranks."""
        return self.prepared.eval_loader("val", self.batch, self.trainer, self.validated)

    def test_dataloader(self) -> Joined:
        """Return batches that contain every test window once across all ranks."""
        return self.prepared.eval_loader("test", self.batch, self.trainer)

    def transfer_batch_to_device(
        self, batch: Stored, device: torch.device, dataloader_idx: int = 0
    ) -> Stored:
        """Move the ids; Lightning's default would search the batch for what it can move."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Stored, dataloader_idx: int) -> Batch:
        """Return `(tokens, targets)`; ids travel to the device in their narrow stored type."""
        return self.windows["train"].widen(batch)

    def receipt_lines(self) -> dict[str, str]:
        """Return what the receipt of a run says of the data and the windows."""
        return self.prepared.receipt_lines(self.validated)

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints say of the tokens; `generate` needs no more of the data."""
        return {**self.prepared.state(), **past_of(self.trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to train on with other tokens, or in another order than so far."""
        is_training = self.trainer is not None and self.trainer.training
        if is_training:
            self.prepared.refuse_other(state_dict, self.force)
        if is_training and not self.force:
            refuse_other_past(self.order, state_dict)
