"""Batches of packed windows; see `packing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep_gpt.config import DataConfig
from lockstep_gpt.data.datamodule import Feed, Rows, TokenDataModule, TokenStream
from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.shards import open_split
from lockstep_gpt.data.windows import Batch
from lockstep_gpt.extras.documents import packing
from lockstep_gpt.extras.documents.documents_settings import is_packed
from lockstep_gpt.model.functional import IGNORE

# Tokens and targets, (B, 2, T), in their narrow stored type; how many of each row are real, (B).
Packed = tuple[Tensor, Tensor]


class PackedWindows:
    """The windows of one split, memory-mapped."""

    def __init__(self, folder: Path, split: str, block_size: int) -> None:
        packed = packing.folder_within(folder, block_size)
        self.tokens = np.asarray(open_split(folder, split))
        self.starts, self.lengths, self.first = packing.opened(packed, split)
        self.block_size = block_size
        end = packing.end_of_text(folder, "data.packing=documents")
        self.filler = 0 if end else 1  # padding is no document for each token

    def gather(self, rows: Positions) -> Packed:
        """Copy the windows with these numbers, (B,); -1 is padding."""
        stored = np.full((len(rows), 2, self.block_size), self.filler, self.tokens.dtype)
        real = np.zeros(len(rows), np.int64)
        for row, window in enumerate(rows.tolist()):
            if window < 0:
                continue
            pieces = slice(*self.first[window : window + 2].tolist())
            begin = 0
            starts, lengths = self.starts[pieces].tolist(), self.lengths[pieces].tolist()
            for start, length in zip(starts, lengths, strict=True):
                end = begin + length
                stored[row, 0, begin:end] = self.tokens[start : start + length]
                stored[row, 1, begin:end] = self.tokens[start + 1 : start + length + 1]
                begin = end
            real[row] = begin
        return torch.from_numpy(stored), torch.from_numpy(real)


class PackedStream(TokenStream):
    """Micro-batches of one rank from one split, in packed windows."""

    def __iter__(self) -> Iterator[Any]:
        windows = PackedWindows(self.folder, self.split, self.block_size)
        for rows in self.rows(*self.share):
            stored, real = windows.gather(rows)
            yield (stored.pin_memory() if self.pinned else stored), real


class PackedDataModule(TokenDataModule):
    """Batches of packed windows, in the same order of window numbers as without packing.

    Targets of padding are `IGNORE`, and no token sees it, because it comes last.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        held = packing.load(packing.pack(folder, self.block_size))
        self.train_windows = held["train"].windows
        self.val_windows = self.val_windows_held_out = held["val"].windows
        if (val_tokens := settings.get("val_tokens")) is not None:
            self.val_windows = min(self.val_windows, max(1, val_tokens // self.block_size))

    def feed(self, split: str, rows: Rows) -> Feed:
        """Return a `Feed` that loads the batches of a split ahead."""
        stream = PackedStream(self.folder, split, self.block_size, rows)
        stream.pinned = self._attached_trainer().strategy.root_device.type == "cuda"
        return Feed(stream)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, *_: Any) -> Any:
        """Move both tensors."""
        stored, real = batch
        stored = stored.int() if device.type == "mps" else stored  # MPS lacks uint16
        copies = device.type == "cuda"
        return stored.to(device, non_blocking=copies), real.to(device, non_blocking=copies)

    def on_after_batch_transfer(self, batch: Any, *_: Any) -> Batch:
        """Return `(tokens, targets)`."""
        return widened(batch)


def widened(packed: Packed) -> Batch:
    """Return tokens and targets, (B, T) and int64; targets of padding are `IGNORE`."""
    stored, real = packed
    tokens, targets = stored.long().unbind(1)
    padding = torch.arange(stored.shape[-1], device=stored.device) >= real[:, None]
    return tokens.contiguous(), targets.masked_fill(padding, IGNORE)


def data_module(data: DataConfig) -> Callable[..., TokenDataModule] | None:
    """Return the data module's class of a run with `data.packing=documents`."""
    return PackedDataModule if is_packed(data) else None
