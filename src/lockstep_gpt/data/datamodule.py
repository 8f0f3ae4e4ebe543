"""Turns token files into the batches of one rank."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch

from lockstep_gpt.data import shards
from lockstep_gpt.data.order import Order, Positions, validation_rows
from lockstep_gpt.data.windows import Batch, Stored, gather, open_windows, widen

GROUP = 8  # micro-batches to gather and hand over at once, because each call costs microseconds
Rows = Callable[[int, int], Iterable[Positions]]


class TokenStream(Iterable[Stored]):
    """Micro-batches of one rank from one split.

    With n workers, worker w makes micro-batches w, w + n, .... `rows`, called with w and n,
    returns the windows of these micro-batches, each (B,).
    """

    pinned = False  # whether batches are in page-locked memory, for copies to a GPU
    share = (0, 1)  # w and n

    def __init__(self, folder: Path, split: str, block_size: int, rows: Rows) -> None:
        self.folder, self.split, self.block_size, self.rows = folder, split, block_size, rows

    def __iter__(self) -> Iterator[Stored]:
        windows = open_windows(self.folder, self.split, self.block_size)
        batches = iter(self.rows(*self.share))
        while group := [*islice(batches, GROUP)]:
            yield from gather(windows, group, self.pinned)


def _share(rows: Positions, worker: int, workers: int) -> Iterable[Positions]:
    return rows[worker::workers]


class Feed(Iterable[Stored]):
    """Loads batches ahead in a thread, `group` at a time; training `waited` this many seconds."""

    def __init__(self, batches: Iterable[Stored], group: int = GROUP) -> None:
        self.batches, self.group = batches, group
        self.waited = 0.0
        self.ahead: Future[list[Stored]] | None = None

    def __iter__(self) -> Iterator[Stored]:
        batches = iter(self.batches)
        with ThreadPoolExecutor(1, "feed") as thread:
            self.ahead = thread.submit(list, islice(batches, 1))  # one alone comes sooner
            while group := self._await(self.ahead):
                self.ahead = thread.submit(list, islice(batches, self.group))
                yield from group

    def _await(self, ahead: Future[list[Stored]]) -> list[Stored]:
        started = time.perf_counter()
        group = ahead.result()
        self.waited += time.perf_counter() - started
        return group


class TokenDataModule(lightning.LightningDataModule):
    """Batches of prepared tokens for the Trainer's current rank and step.

    The data is already split across ranks. Lightning adds no sampler to split it again, because
    the loaders are iterables without a length.

    Args:
        folder: what `prepare` returned; raises a `UserError` if damaged, or a split is too short.
        block_size: tokens of context, T.
        micro_size: samples per device and micro-step, B.
        accumulation: micro-steps per optimizer step.
        seed: decides the order of the training windows.
        val_tokens: most tokens to validate on, in whole windows, at least one; None: all.
    """

    order_of: Callable[..., Order] = Order

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        micro_size: int,
        accumulation: int,
        seed: int,
        val_tokens: int | None = None,
    ) -> None:
        super().__init__()
        index = shards.load_index(folder)
        shards.check_block_size(index, block_size)
        self.folder, self.block_size, self.micro_size = folder, block_size, micro_size
        self.tokenizer = index.tokenizer  # in the form that `tokenizer.from_dict` accepts
        self.accumulation, self.seed = accumulation, seed
        self._saved = (0, 0)  # optimizer step of the checkpoint, and samples seen by then
        self.train_windows = index.windows("train", block_size)
        self.val_windows_held_out = index.windows("val", block_size)
        self.val_windows = self.val_windows_held_out
        if val_tokens is not None:
            self.val_windows = min(self.val_windows, max(1, val_tokens // block_size))

    def resume_at(self, step: int, samples: int) -> None:
        """Continue after optimizer step `step`, by which the run has seen `samples` samples."""
        self._saved = step, samples

    def samples_seen(self, step: int) -> int:
        """Return how many samples all ranks together have seen up to optimizer step `step`."""
        first, samples = self._saved
        per_step = self.micro_size * self.accumulation * self._attached_trainer().world_size
        return samples + (step - first) * per_step

    def train_dataloader(self) -> Feed:
        """Return endless batches, starting at the Trainer's current step."""
        trainer = self._attached_trainer()
        order = self.order_of(
            seed=self.seed,
            size=self.train_windows,
            micro_size=self.micro_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulation=self.accumulation,
            start=self.samples_seen(trainer.global_step),
        )
        self.training_feed = self.feed("train", order.stream)
        return self.training_feed

    def val_dataloader(self) -> Feed:
        """Return batches that contain every validation window once across all ranks."""
        trainer = self._attached_trainer()
        sizes = self.val_windows_held_out, self.val_windows, self.micro_size
        rows = validation_rows(*sizes, trainer.global_rank, trainer.world_size)
        return self.feed("val", partial(_share, rows))

    def transfer_batch_to_device(self, batch: Stored, device: torch.device, *_: Any) -> Stored:
        """Move the windows; Lightning's default would search the batch for what it can move."""
        windows, real = batch
        windows = windows.int() if device.type == "mps" else windows  # MPS lacks uint16
        return windows.to(device, non_blocking=device.type == "cuda"), real

    def on_after_batch_transfer(self, batch: Stored, *_: Any) -> Batch:
        """Return `(tokens, targets)`; ids travel to the device in their narrow stored type."""
        return widen(batch)

    def feed(self, split: str, rows: Rows) -> Feed:
        """Return a `Feed` that loads the batches of a split ahead."""
        stream = TokenStream(self.folder, split, self.block_size, rows)
        stream.pinned = self._attached_trainer().strategy.root_device.type == "cuda"
        return Feed(stream)

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the Trainer makes the loaders: it knows rank and step"
        return self.trainer
