"""From token files to the batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep_gpt.data.order import Order, Positions, validation_rows
from lockstep_gpt.data.shards import (
    Batch,
    check_block_size,
    gather,
    load_index,
    open_windows,
)


class TrainingStream(IterableDataset[Batch]):
    """The endless micro-batches of one rank from micro-batch `first` of the run on.

    A loader asks its workers in turn, so worker w of n makes micro-batches w, w + n, ... and the
    stream is the same for any number of workers.
    """

    def __init__(self, folder: Path, block_size: int, order: Order, first: int) -> None:
        super().__init__()
        self.folder, self.block_size = folder, block_size
        self.order, self.first = order, first

    def __iter__(self) -> Iterator[Batch]:
        windows = open_windows(self.folder, "train", self.block_size)
        worker, workers = _worker_share()
        for rows in self.order.stream(self.first + worker, stride=workers):
            yield gather(windows, rows)


class ValidationStream(IterableDataset[Batch]):
    """The validation micro-batches of one rank, `rows` of windows in sequence."""

    def __init__(self, folder: Path, block_size: int, rows: Positions) -> None:
        super().__init__()
        self.folder, self.block_size, self.rows = folder, block_size, rows

    def __iter__(self) -> Iterator[Batch]:
        windows = open_windows(self.folder, "val", self.block_size)
        worker, workers = _worker_share()
        for rows in self.rows[worker::workers]:
            yield gather(windows, rows)


def _worker_share() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _unchanged(batch: Any) -> Any:
    """Stand in for torch's default, which would turn the tuple into a list."""
    return batch


class TokenDataModule(lightning.LightningDataModule):
    """Batches of prepared tokens for the rank and the step at which the Trainer stands.

    Both streams are iterable datasets because Lightning gives those no sampler of its own, which
    would split among the ranks what is split already.

    Args:
        folder: what `prepare` returned.
        block_size: tokens of context, T.
        micro_size: samples per device and micro-step, B.
        accumulation: micro-steps per optimizer step.
        seed: decides the order of the training windows.
        val_tokens: validate on at most so many tokens, in whole windows, at least one; None: all.
        num_workers: loader processes per rank; 0: the rank itself.

    Raises:
        UserError: the folder is damaged, or a split has no whole window.
    """

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        micro_size: int,
        accumulation: int,
        seed: int,
        val_tokens: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        index = load_index(folder)
        check_block_size(index, block_size)
        self.folder, self.block_size, self.micro_size = folder, block_size, micro_size
        self.accumulation, self.seed, self.num_workers = accumulation, seed, num_workers
        self.train_windows = index.windows("train", block_size)
        self.val_windows_held_out = index.windows("val", block_size)
        self.val_windows = self.val_windows_held_out
        if val_tokens is not None:
            self.val_windows = min(self.val_windows, max(1, val_tokens // block_size))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return `(tokens, targets)` without end, from the Trainer's current step on."""
        trainer = self._attached_trainer()
        order = Order(
            seed=self.seed,
            size=self.train_windows,
            micro_size=self.micro_size,
            accumulation=self.accumulation,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        first = trainer.global_step * self.accumulation
        return self._loader(TrainingStream(self.folder, self.block_size, order, first))

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return `(tokens, targets)` of every validation window once over all ranks."""
        trainer = self._attached_trainer()
        rows = validation_rows(
            self.val_windows_held_out,
            self.val_windows,
            self.micro_size,
            trainer.global_rank,
            trainer.world_size,
        )
        return self._loader(ValidationStream(self.folder, self.block_size, rows))

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the Trainer makes the loaders: it knows rank and step"
        return self.trainer

    def _loader(self, stream: IterableDataset[Batch]) -> DataLoader[Batch]:
        return DataLoader(
            stream,
            batch_size=None,  # a stream yields whole batches
            collate_fn=_unchanged,
            num_workers=self.num_workers,
            pin_memory=self._attached_trainer().strategy.root_device.type == "cuda",
            persistent_workers=self.num_workers > 0,  # validation comes again and again
            generator=torch.Generator(),  # or making an iterator would draw from the run's own
        )
