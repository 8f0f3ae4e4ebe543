"""Batches of packed windows; see `packing`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep_gpt.config import DataConfig
from lockstep_gpt.data.datamodule import Feed, Rows, TokenDataModule, TokenStream
from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.prepare import SPLITS
from lockstep_gpt.data.shards import open_split
from lockstep_gpt.data.windows import Batch
from lockstep_gpt.extras.documents import packing
from lockstep_gpt.extras.documents.documents_settings import is_packed
from lockstep_gpt.model.functional import IGNORE

# Tokens and targets, (B, 2, T), in their narrow stored type; how many of each row are real, (B).
Packed = tuple[Tensor, Tensor]


class PackedWindows:
    """The windows of one split, memory-mapped; of a mixture, each source's after one another."""

    def __init__(self, folder: Path, split: str, block_size: int) -> None:
        packed = packing.folder_within(folder, block_size)
        names = packing.parts(packing.load(packed), split)
        self.parts = [
            (np.asarray(open_split(folder, name)), *packing.opened(packed, name)) for name in names
        ]
        self.begins = [0, *accumulate(len(first) - 1 for *_, first in self.parts)]
        self.dtype = self.parts[0][0].dtype
        self.block_size = block_size
        end = packing.end_of_text(folder, "data.packing=documents")
        self.filler = 0 if end else 1  # padding is no document for each token

    def gather(self, rows: Positions) -> Packed:
        """Copy the windows with these numbers, (B,); -1 is padding."""
        stored = np.full((len(rows), 2, self.block_size), self.filler, self.dtype)
        real = np.zeros(len(rows), np.int64)
        for row, window in enumerate(rows.tolist()):
            if window < 0:
                continue
            part = bisect_right(self.begins, window) - 1
            tokens, starts, lengths, first = self.parts[part]
            own, begin = window - self.begins[part], 0
            pieces = slice(*first[own : own + 2].tolist())
            for start, length in zip(
                starts[pieces].tolist(), lengths[pieces].tolist(), strict=True
            ):
                end = begin + length
                stored[row, 0, begin:end] = tokens[start : start + length]
                stored[row, 1, begin:end] = tokens[start + 1 : start + length + 1]
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
        packing.pack(folder, self.block_size)
        counts = self.counts(folder, self.block_size)
        self.train_windows, self.val_windows_held_out = (
            sum(counts[name] for name in packing.parts(counts, split)) for split in SPLITS
        )
        self.val_windows = self.val_windows_held_out
        if (val_tokens := settings.get("val_tokens")) is not None:
            self.val_windows = min(self.val_windows, max(1, val_tokens // self.block_size))

    @staticmethod
    def counts(folder: Path, block_size: int) -> dict[str, int]:
        """Return how many windows each packed split of a folder has; raise a `UserError`."""
        packed = packing.load(packing.folder_within(folder, block_size))
        return {name: each.windows for name, each in packed.items()}

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
    """Return the data module's class of a run on one source with `data.packing=documents`."""
    return None if getattr(data, "sources", None) else windows_of_sources(data)


def windows_of_sources(data: DataConfig) -> type[PackedDataModule] | None:
    """Return the class that makes a mixture's batches, if it has `data.packing=documents`."""
    return PackedDataModule if is_packed(data) else None
