"""Turns token files into the batches of one rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import lightning
import numpy as np
import torch

from lockstep_gpt.data import order, shards
from lockstep_gpt.data.data_place import data_place
from lockstep_gpt.data.feeding import Feed, TokenStream, move_to_device
from lockstep_gpt.data.order import Order, Positions
from lockstep_gpt.data.packing import Packing, Stream
from lockstep_gpt.data.windows import Batch, Stored
from lockstep_gpt.errors import UserError

# Training windows of each part, windows of the whole run, tokens of a window -> rule of the order.
OrderRule = Callable[[Mapping[str, int], int, int], order.Rule]


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

    Without a Trainer, for example in a notebook:

        >>> from lockstep_gpt.data.prepare import prepare
        >>> from lockstep_gpt.data.sources.text import Text
        >>> folder = prepare(Text(path="corpus.txt"))  # into the folder `data`
        >>> data = TokenDataModule(folder, block_size=64, micro_size=8, accumulation=1, seed=0)
        >>> rows = data.rows_of("val")  # the numbers of windows, (batches, 8)
        >>> tokens, targets = next(data.batches("val", rows, torch.device("cpu")))
        >>> tokens.shape
        torch.Size([8, 64])
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
        self.tokens_per_sample = block_size
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

    @property
    def may_ignore(self) -> bool:
        """Whether batches of training may have targets that don't count."""
        return self.windows["train"].has_padding

    def resume_at(self, step: int, samples: int) -> None:
        """Continue after optimizer step `step`, by which the run has seen `samples` samples."""
        self._saved = step, samples

    def samples_seen(self, step: int) -> int:
        """Return how many samples all ranks together have seen up to optimizer step `step`."""
        first, samples = self._saved
        per_step = self.micro_size * self.accumulation * data_place(self._attached_trainer()).size
        return samples + (step - first) * per_step

    def train_dataloader(self) -> Feed:
        """Return endless batches, starting at the Trainer's current step."""
        trainer = self._attached_trainer()
        place = data_place(trainer)
        planned = self.samples_seen(trainer.max_steps)
        self.order = Order(
            seed=self.seed,
            size=self.train_windows,
            micro_size=self.micro_size,
            rank=place.rank,
            world_size=place.size,
            accumulation=self.accumulation,
            start=self.samples_seen(trainer.global_step),
            rule=self.order_rule(self.windows["train"].counts, planned, self.block_size),
        )
        self.training_feed = self._feed("train", self.order)
        return self.training_feed

    def micro_batch(self, step: int, number: int, device: torch.device) -> Batch:
        """Read one micro-batch of training again: the one of this number after `step` updates.

        Numbers count the micro-batches of a step over all ranks. The loader of training must exist.
        """
        first = self.samples_seen(step) + number * self.micro_size
        positions = first + np.arange(self.micro_size)
        rows = self.order.rule(positions, self.train_windows, self.seed)
        return next(self.batches("train", [rows], device))

    def val_dataloader(self) -> Feed:
        """Return batches that contain every validation window once across all ranks."""
        parts = self.rows_by_part("val", self.validated, *data_place(self._attached_trainer()))
        return self._feed("val", np.concatenate([*parts.values()]))

    def test_dataloader(self) -> Feed:
        """Return batches that contain every test window once across all ranks."""
        return self._feed("test", self.rows_of("test", *data_place(self._attached_trainer())))

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
        """Return one rank's windows of each part; see `order.rows_by_part`."""
        counts = self.windows[split].counts
        return order.rows_by_part(counts, used, self.micro_size, rank, world_size)

    def batches(
        self, split: str, rows: Iterable[Positions], device: torch.device
    ) -> Iterator[Batch]:
        """Yield the batches of these windows of a split on a device, without a Trainer."""
        for stored in self._stream(split, rows):
            yield self.windows[split].widen(move_to_device(stored, device))

    def transfer_batch_to_device(
        self,
        batch: Stored,
        device: torch.device,
        dataloader_idx: int = 0,
    ) -> Stored:
        """Move the ids; Lightning's default would search the batch for what it can move."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Stored, dataloader_idx: int) -> Batch:
        """Return `(tokens, targets)`; ids travel to the device in their narrow stored type."""
        trainer = self._attached_trainer()
        split = "train"
        if trainer.testing:
            split = "test"
        elif trainer.validating or trainer.sanity_checking:
            split = "val"
        return self.windows[split].widen(batch)

    def _feed(self, split: str, rows: Iterable[Positions]) -> Feed:
        """Return a `Feed` that loads the batches of a split ahead."""
        device = self._attached_trainer().strategy.root_device
        return Feed(self._stream(split, rows, pinned=device.type == "cuda"))

    def _stream(self, split: str, rows: Iterable[Positions], pinned: bool = False) -> TokenStream:
        return TokenStream(self.windows[split], rows, pinned)

    def _attached_trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the Trainer makes the loaders: it knows rank and step"
        return self.trainer
