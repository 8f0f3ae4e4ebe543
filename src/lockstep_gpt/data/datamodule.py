"""Turns token files into the batches of one rank."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import lightning
import numpy as np
import torch

from lockstep_gpt.data import order, shards
from lockstep_gpt.data.order import Order, Positions, validation_rows
from lockstep_gpt.data.packing import Packing, Stream
from lockstep_gpt.data.sources.source import TargetMask
from lockstep_gpt.data.windows import (
    Batch,
    Stored,
    Windows,
    first_windows,
    parts_of_rows,
)
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.settings import counted

GROUP = 8  # micro-batches to gather and hand over at once, because each call costs microseconds
# Training windows of each part, windows of the whole run, tokens of a window -> rule of the order.
OrderRule = Callable[[Mapping[str, int], int, int], order.Rule]


class Feed(Iterable[Stored]):
    """Loads batches ahead in a thread, `group` at a time; training `waited` this many seconds."""

    def __init__(self, batches: Iterable[Stored], group: int = GROUP) -> None:
        self.batches = batches
        self.group = group
        self.waited = 0.0

    def __iter__(self) -> Iterator[Stored]:
        batches = iter(self.batches)
        with ThreadPoolExecutor(1, "feed") as thread:
            ahead = thread.submit(list, islice(batches, 1))  # one alone comes sooner
            while group := self._await(ahead):
                ahead = thread.submit(list, islice(batches, self.group))
                yield from group

    def _await(self, ahead: Future[list[Stored]]) -> list[Stored]:
        started = time.perf_counter()
        group = ahead.result()
        self.waited += time.perf_counter() - started
        return group


class TokenStream(Iterable[Stored]):
    """Micro-batches of the windows whose numbers `rows` yields, each (B,).

    Args:
        windows: of one split.
        rows: called for each iteration.
        pinned: whether to use page-locked memory, for copies to a GPU.
        with_parts: whether batches say which part of the corpus each row is from.
    """

    def __init__(
        self,
        windows: Windows,
        rows: Callable[[], Iterable[Positions]],
        pinned: bool = False,
        with_parts: bool = False,
    ) -> None:
        self.windows = windows
        self.rows = rows
        self.pinned = pinned
        self.with_parts = with_parts

    def __iter__(self) -> Iterator[Stored]:
        numbers = iter(self.rows())
        while group := [*islice(numbers, GROUP)]:
            batches = self.windows.gather(group, self.pinned)
            if not self.with_parts:
                yield from batches
                continue
            for stored, rows in zip(batches, group, strict=True):
                parts = torch.from_numpy(parts_of_rows(self.windows.counts, rows))
                yield stored._replace(parts=parts)


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
        packing: makes the windows.
        order_rule: returns the rule of the order.
        target_masks: which targets count in a part of the corpus; all do in other parts.
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
        packing: Packing | None = None,
        order_rule: OrderRule = lambda *_: order.windows,
        target_masks: Mapping[str, TargetMask] | None = None,
    ) -> None:
        super().__init__()
        index = shards.load_index(folder)
        shards.check_block_size(index, block_size)
        self.folder = folder
        self.block_size = block_size
        self.micro_size = micro_size
        self.accumulation = accumulation
        self.seed = seed
        self.order_rule = order_rule
        self.target_masks = target_masks or {}
        self.tokenizer = index.tokenizer  # in the form that `tokenizer_choice.from_dict` accepts
        self._saved = (0, 0)  # optimizer step of the checkpoint, and samples seen by then
        packing = packing or Stream()
        packing.prepare(folder, block_size)
        splits = [name for name in index.splits if "/" not in name]
        self.windows = {name: packing.open(folder, name, block_size) for name in splits}
        self.train_windows = sum(self.windows["train"].counts.values())
        # How many windows of each part to validate on.
        self.validated = dict(self.windows["val"].counts)
        if val_tokens is not None:
            most = max(1, val_tokens // len(self.validated) // block_size)
            self.validated = {name: min(most, size) for name, size in self.validated.items()}
        self.val_windows = sum(self.validated.values())
        if self.target_masks:
            self._refuse_no_targets()

    @property
    def may_ignore(self) -> bool:
        """Whether batches of training may have targets that don't count."""
        return bool(self.target_masks) or self.windows["train"].has_padding

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
        planned = self.samples_seen(trainer.max_steps)
        rows = Order(
            seed=self.seed,
            size=self.train_windows,
            micro_size=self.micro_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulation=self.accumulation,
            start=self.samples_seen(trainer.global_step),
            rule=self.order_rule(self.windows["train"].counts, planned, self.block_size),
        )
        self.training_feed = self._feed("train", rows.stream)
        return self.training_feed

    def val_dataloader(self) -> Feed:
        """Return batches that contain every validation window once across all ranks."""
        trainer = self._attached_trainer()
        ranks = trainer.global_rank, trainer.world_size
        rows = np.concatenate([*self.rows_by_part("val", self.validated, *ranks).values()])
        return self._feed("val", lambda: rows)

    def test_dataloader(self) -> Feed:
        """Return batches that contain every test window once across all ranks."""
        trainer = self._attached_trainer()
        rows = self.rows_of("test", trainer.global_rank, trainer.world_size)
        return self._feed("test", lambda: rows)

    def rows_of(self, split: str, rank: int = 0, world_size: int = 1) -> Positions:
        """Return one rank's windows of a whole split, (batches, B) with -1 as padding."""
        if split not in self.windows:
            raise UserError(
                f"{self.folder} has no {split} split; prepare one with "
                f"{shards.load_index(self.folder).test_settings()}"
            )
        parts = self.rows_by_part(split, self.windows[split].counts, rank, world_size)
        return np.concatenate([*parts.values()])

    def rows_by_part(
        self, split: str, used: Mapping[str, int], rank: int, world_size: int
    ) -> dict[str, Positions]:
        """Return one rank's windows of each part, (batches, B) with -1 as padding.

        Args:
            split: val or test.
            used: how many windows of each part to use.
            rank: the rank.
            world_size: the number of ranks.
        """
        counts = self.windows[split].counts
        found = {}
        for (name, size), first in zip(counts.items(), first_windows(counts), strict=True):
            rows = validation_rows(size, used[name], self.micro_size, rank, world_size)
            found[name] = np.where(rows < 0, rows, rows + first)
        return found

    def batches(
        self, split: str, rows: Iterable[Positions], device: torch.device
    ) -> Iterator[Batch]:
        """Yield the batches of these windows of a split on a device, without a Trainer."""
        for stored in self._stream(split, lambda: rows):
            yield self._batch(split, _moved(stored, device))

    def transfer_batch_to_device(
        self,
        batch: Stored,
        device: torch.device,
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> Stored:
        """Move the ids; Lightning's default would search the batch for what it can move."""
        return _moved(batch, device)

    def on_after_batch_transfer(self, batch: Stored, dataloader_idx: int) -> Batch:  # noqa: ARG002
        """Return `(tokens, targets)`; ids travel to the device in their narrow stored type."""
        trainer = self._attached_trainer()
        split = "val" if trainer.validating or trainer.sanity_checking else "train"
        return self._batch("test" if trainer.testing else split, batch)

    def _batch(self, split: str, stored: Stored) -> Batch:
        """Return tokens and targets; targets that don't count are `IGNORE`."""
        windows = self.windows[split]
        tokens, targets = windows.widen(stored)
        if not self.target_masks:
            return tokens, targets
        for place, name in enumerate(windows.counts):
            mask = self.target_masks.get(name)
            if mask is None:
                continue
            counts = mask(tokens, targets)
            if stored.parts is not None:
                counts |= (stored.parts != place)[:, None]
            targets = targets.masked_fill(~counts, IGNORE)
        return tokens, targets

    def _feed(self, split: str, rows: Callable[[], Iterable[Positions]]) -> Feed:
        """Return a `Feed` that loads the batches of a split ahead."""
        device = self._attached_trainer().strategy.root_device
        return Feed(self._stream(split, rows, device.type == "cuda"))

    def _stream(
        self, split: str, rows: Callable[[], Iterable[Positions]], pinned: bool = False
    ) -> TokenStream:
        windows = self.windows[split]
        with_parts = bool(self.target_masks) and len(windows.counts) > 1
        return TokenStream(windows, rows, pinned, with_parts)

    def _refuse_no_targets(self) -> None:
        """Raise a `UserError` if no target of the validation counts: its loss would be 0 / 0."""
        rows = np.concatenate([*self.rows_by_part("val", self.validated, 0, 1).values()])
        batches = self.batches("val", rows, torch.device("cpu"))
        if not any(bool((targets != IGNORE).any()) for _, targets in batches):
            windows = counted(self.val_windows, "validation window")
            raise UserError(
                f"{self.folder}: the {windows} used have no token of an answer; raise "
                "data.val_tokens or data.val_fraction, or a context in which answers aren't cut off"
            )

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the Trainer makes the loaders: it knows rank and step"
        return self.trainer


def _moved(stored: Stored, device: torch.device) -> Stored:
    """Return a batch on a device."""
    ids = stored.ids
    if ids.device == device:
        return stored
    if device.type == "mps":
        ids = ids.int()  # MPS lacks uint16
    copies = device.type == "cuda"  # while the host continues
    real = stored.real
    if isinstance(real, torch.Tensor):
        real = real.to(device, non_blocking=copies)
    parts = stored.parts
    if parts is not None:
        parts = parts.to(device, non_blocking=copies)
    return Stored(ids.to(device, non_blocking=copies), real, parts)
