"""From token files to the batches of one rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep_gpt.data import shards
from lockstep_gpt.data.order import Order, Positions, validation_rows

GROUP = 8  # micro-batches that are gathered and handed over at a time: each call costs microseconds
WORKER_LIMIT = 300  # seconds that a worker may take for one batch


class TokenStream(IterableDataset[shards.Stored], ABC):
    """Micro-batches of one rank out of one split.

    A loader asks its workers in turn, so worker w of n makes micro-batches w, w + n, ... and the
    stream is the same for any number of workers.
    """

    split: ClassVar[str]

    def __init__(self, folder: Path, block_size: int, pinned: bool = False) -> None:
        super().__init__()
        self.folder, self.block_size, self.pinned = folder, block_size, pinned

    @abstractmethod
    def rows(self, worker: int, workers: int) -> Iterable[Positions]:
        """Return the windows of micro-batches `worker`, `worker + workers`, ..., each (B,)."""

    def __iter__(self) -> Iterator[shards.Stored]:
        windows = shards.open_windows(self.folder, self.split, self.block_size)
        info = get_worker_info()
        batches = iter(self.rows(info.id, info.num_workers) if info else self.rows(0, 1))
        while group := [*islice(batches, GROUP)]:
            yield from shards.gather(windows, group, self.pinned)


class TrainingStream(TokenStream):
    """The endless micro-batches of one rank from micro-batch `first` of the run on."""

    split = "train"

    def __init__(self, folder: Path, block_size: int, order: Order, first: int) -> None:
        super().__init__(folder, block_size)
        self.order, self.first = order, first

    def rows(self, worker: int, workers: int) -> Iterable[Positions]:
        """Return what the order says."""
        return self.order.stream(self.first + worker, stride=workers)


class ValidationStream(TokenStream):
    """The validation micro-batches of one rank, `all_rows` (batches, B) in sequence."""

    split = "val"

    def __init__(self, folder: Path, block_size: int, all_rows: Positions) -> None:
        super().__init__(folder, block_size)
        self.all_rows = all_rows

    def rows(self, worker: int, workers: int) -> Iterable[Positions]:
        """Return a worker's share of them."""
        return self.all_rows[worker::workers]


class Feed(Iterable[shards.Stored]):
    """Takes batches ahead in a thread, and keeps how long the training waited for them.

    Args:
        batches: to be taken.
        group: how many are handed over at a time.

    Attributes:
        waited: seconds in all.
    """

    def __init__(self, batches: Iterable[shards.Stored], group: int = GROUP) -> None:
        self.batches, self.group = batches, group
        self.waited = 0.0
        self._ahead: Future[list[shards.Stored]] | None = None

    def __iter__(self) -> Iterator[shards.Stored]:
        batches = iter(self.batches)
        with ThreadPoolExecutor(1, "feed") as thread:
            self._ahead = thread.submit(list, islice(batches, 1))  # the first one comes at once
            while group := self._await(self._ahead):
                self._ahead = thread.submit(list, islice(batches, self.group))
                yield from group

    def _await(self, ahead: Future[list[shards.Stored]]) -> list[shards.Stored]:
        started = time.perf_counter()
        group = ahead.result()
        self.waited += time.perf_counter() - started
        return group

    def close(self) -> None:
        """End the processes of a DataLoader.

        The garbage collector would take their queues first, and then wait 5 s for each of them.
        """
        if self._ahead is not None:
            wait([self._ahead])
        if (iterator := getattr(self.batches, "_iterator", None)) is not None:
            iterator._shutdown_workers()


class TokenDataModule(lightning.LightningDataModule):
    """Batches of prepared tokens for the rank and the step at which the Trainer stands.

    Lightning adds no sampler of its own, which would split among the ranks what is split already:
    what it gets are iterables without a length.

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
        index = shards.load_index(folder)
        shards.check_block_size(index, block_size)
        self.folder, self.block_size, self.micro_size = folder, block_size, micro_size
        self.tokenizer = index.tokenizer  # as `tokenizer.from_dict` takes it
        self.accumulation, self.seed, self.num_workers = accumulation, seed, num_workers
        self._feeds: list[Feed] = []  # those with processes of their own
        self.train_windows = index.windows("train", block_size)
        self.val_windows_held_out = index.windows("val", block_size)
        self.val_windows = self.val_windows_held_out
        if val_tokens is not None:
            self.val_windows = min(self.val_windows, max(1, val_tokens // block_size))

    def train_dataloader(self) -> Feed:
        """Return batches without end, from the Trainer's current step on."""
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
        self.training_feed = self._feed(TrainingStream(self.folder, self.block_size, order, first))
        return self.training_feed

    def val_dataloader(self) -> Feed:
        """Return batches of every validation window once over all ranks."""
        trainer = self._attached_trainer()
        rows = validation_rows(
            self.val_windows_held_out,
            self.val_windows,
            self.micro_size,
            trainer.global_rank,
            trainer.world_size,
        )
        return self._feed(ValidationStream(self.folder, self.block_size, rows))

    def transfer_batch_to_device(
        self,
        batch: shards.Stored,
        device: torch.device,
        dataloader_idx: int,  # noqa: ARG002
    ) -> shards.Stored:
        """Send the windows; Lightning's own would search the batch for what can be sent."""
        windows, real = batch
        return windows.to(device, non_blocking=True), real

    def on_after_batch_transfer(self, batch: shards.Stored, dataloader_idx: int) -> shards.Batch:  # noqa: ARG002
        """Return `(tokens, targets)`: ids travel to the device as narrow as they are stored."""
        return shards.widen(batch)

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """End what feeds a run that is over."""
        for feed in self._feeds:
            feed.close()
        self._feeds.clear()

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the Trainer makes the loaders: it knows rank and step"
        return self.trainer

    def _feed(self, stream: TokenStream) -> Feed:
        on_gpu = self._attached_trainer().strategy.root_device.type == "cuda"
        if not self.num_workers:
            stream.pinned = on_gpu
            return Feed(stream)
        feed = Feed(
            DataLoader(
                stream,
                batch_size=None,  # a stream yields whole batches
                collate_fn=_unchanged,
                num_workers=self.num_workers,
                timeout=WORKER_LIMIT,  # a worker that cannot hand over its batch does not end
                pin_memory=on_gpu,
                persistent_workers=True,  # validation comes again and again
                generator=torch.Generator(),  # or an iterator would draw from the run's own
            ),
            group=1,
        )
        self._feeds.append(feed)
        return feed


def _unchanged(batch: Any) -> Any:
    """Stand in for torch's default, which would turn the tuple into a list."""
    return batch
