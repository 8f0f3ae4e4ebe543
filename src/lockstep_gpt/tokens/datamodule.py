"""Turns token files into the batches of one rank."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import lightning
import torch

from lockstep_gpt.errors import UserError
from lockstep_gpt.loading.loaders import (
    EvalLoader,
    Joined,
    TrainLoader,
    eval_loader,
    train_loader,
)
from lockstep_gpt.loading.order import Order
from lockstep_gpt.tokens import shards
from lockstep_gpt.tokens.packing import Packing, Stream
from lockstep_gpt.tokens.windows import (
    Batch,
    SpreadWindows,
    Stored,
    Windows,
    move_to_device,
)

# Training windows of each part, windows of the whole run, tokens of a window, seed -> order.
MakeOrder = Callable[[Mapping[str, int], int, int, int], Order]


class TokenDataModule(lightning.LightningDataModule):
    """Batches of prepared tokens for the Trainer's current rank and step.

    A LightningDataModule of your own for any map-style dataset can be as short; see `loaders`.

    Args:
        folder: what `prepare` returned; raises a `UserError` if damaged, or a split is too short.
        block_size: tokens of context, T.
        micro_size: samples per device and micro-step, B.
        seed: decides the order of the training windows.
        val_tokens: most tokens to validate on, in whole windows, at least one; None: all.
        packing: makes the windows.
        make_order: returns which window each position of the run takes.

    Without a Trainer, for example in a notebook:

        >>> from lockstep_gpt.tokens.prepare import prepare
        >>> from lockstep_gpt.tokens.sources.text import Text
        >>> folder = prepare(Text(path="corpus.txt"))  # into the folder `data`
        >>> data = TokenDataModule(folder, block_size=64, micro_size=8, seed=0)
        >>> from lockstep_gpt.tokens.windows import read_windows
        >>> tokens, targets = read_windows(data.windows["val"], range(8))
        >>> tokens.shape
        torch.Size([8, 64])
    """

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        micro_size: int,
        seed: int,
        val_tokens: int | None = None,
        packing: Packing | None = None,
        make_order: MakeOrder | None = None,
    ) -> None:
        super().__init__()
        index = shards.load_index(folder)
        shards.check_block_size(index, block_size)
        self.folder = folder
        self.block_size = block_size
        self.micro_size = micro_size
        self.seed = seed
        self.make_order = make_order
        self.tokens_per_sample = block_size
        self.tokenizer = index.tokenizer  # in the form that `tokenizer_choice.from_dict` accepts
        self._saved = {"step": 0, "samples": 0}  # of a checkpoint
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
        self._saved = {"step": step, "samples": samples}

    def samples_seen(self, step: int) -> int:
        """Return how many samples all ranks together have seen up to optimizer step `step`."""
        return self._training().samples_seen(step)

    def train_dataloader(self) -> TrainLoader:
        """Return endless batches, starting at the Trainer's current step."""
        loader = self._training()
        if self.make_order is not None:
            planned = loader.samples_seen(loader.trainer.max_steps)
            counts = self.windows["train"].counts
            loader.order = self.make_order(counts, planned, self.block_size, self.seed)
        return loader

    def _training(self) -> TrainLoader:
        windows = self.windows["train"]
        loader = train_loader(
            windows,
            self.micro_size,
            self.trainer,
            seed=self.seed,
            collate=windows.collate,
            workers="thread",
            endless=True,
        )
        loader.load_state_dict(self._saved)
        return loader

    def val_dataloader(self) -> Iterable[Stored]:
        """Return batches that contain every validation window once across all ranks."""
        return Joined(self.eval_loaders("val", self.validated))

    def test_dataloader(self) -> Iterable[Stored]:
        """Return batches that contain every test window once across all ranks."""
        return Joined(self.eval_loaders("test", self.windows_of("test").counts))

    def windows_of(self, split: str) -> Windows:
        """Return the windows of a split, or raise a `UserError` if there is none."""
        if split not in self.windows:
            raise UserError(
                f"{self.folder} has no {split} split; prepare one with "
                f"{shards.load_index(self.folder).test_settings()}"
            )
        return self.windows[split]

    def eval_loaders(self, split: str, used: Mapping[str, int]) -> list[EvalLoader]:
        """Return the batches of each part of the corpus.

        Args:
            split: `val` or `test`.
            used: how many windows of each part to spread evenly over it.
        """
        windows = self.windows[split]
        loaders = []
        first = 0
        for name, size in windows.counts.items():
            loader = eval_loader(
                SpreadWindows(windows, first, size, used[name]),
                self.micro_size,
                self.trainer,
                pad=windows.pad,
                collate=windows.collate,
                workers="thread",
            )
            loaders.append(loader)
            first += size
        return loaders

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
        return self.windows["train"].widen(batch)
