"""Windows that are packed from whole documents; see `whole_documents` for their files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lockstep.functional import IGNORE
from lockstep.mixtures import whole_documents
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.windows import Batch, Stored


class Window(NamedTuple):
    """A window as it is stored."""

    ids: npt.NDArray[Any]  # tokens and targets, (2, T)
    real: int  # how many of them there are


class PackedWindows(Dataset[Any]):
    """The windows of one split, memory-mapped, in the same order of numbers as without packing.

    Targets of padding are `IGNORE`, and no token sees it, because it comes last.
    """

    has_padding = True

    def __init__(self, folder: Path, split: str, block_size: int) -> None:
        packed = whole_documents.folder_within(folder, block_size)
        parts = load_index(folder).parts(split)
        facts = whole_documents.load(packed)
        self.counts = {part: facts[name].windows for part, name in parts.items()}
        self.parts = [
            (
                _with_next(np.asarray(open_split(folder, name))),
                *whole_documents.open_pieces(packed, name),
            )
            for name in parts.values()
        ]
        self.begins = [0, *accumulate(self.counts.values())]
        self.dtype = self.parts[0][0].dtype
        self.block_size = block_size
        end = whole_documents.end_of_text(folder, whole_documents.SETTING)
        self.filler = 0 if end else 1  # padding is no document for each token

    def __len__(self) -> int:
        """Return the number of windows."""
        return self.begins[-1]

    def __getitems__(self, rows: Sequence[int]) -> list[Window]:
        """Copy the windows with these numbers."""
        stored = np.full((len(rows), 2, self.block_size), self.filler, self.dtype)
        return [Window(ids, self._fill(ids, row)) for ids, row in zip(stored, rows, strict=True)]

    def collate(self, windows: Sequence[Window]) -> Stored:
        """Make a batch of windows, (B, 2, T)."""
        ids = np.stack([window.ids for window in windows])
        real = np.array([window.real for window in windows], np.int64)
        return Stored(torch.from_numpy(ids), torch.from_numpy(real))

    def pad(self, stored: Stored, real: int) -> Stored:
        """Return a batch in which rows from `real` on have no targets that count."""
        stored.ids[real:] = self.filler
        stored.real[real:] = 0
        return stored

    def _fill(self, row: npt.NDArray[Any], window: int) -> int:
        """Write a window's tokens and targets, (2, T); return how many there are."""
        part = bisect_right(self.begins, window) - 1
        pairs, starts, lengths, first = self.parts[part]
        number = window - self.begins[part]
        pieces = slice(*first[number : number + 2].tolist())
        place = 0  # of the next piece in the window
        for start, length in zip(starts[pieces].tolist(), lengths[pieces].tolist(), strict=True):
            end = place + length
            row[:, place:end] = pairs[:, start : start + length]
            place = end
        return place

    def widen(self, stored: Stored) -> Batch:
        """Return tokens and targets, (B, T) and int64; targets of padding are `IGNORE`."""
        tokens, targets = stored.ids.long().unbind(1)
        place = torch.arange(tokens.shape[-1], device=tokens.device)
        padding = place >= stored.real[:, None]
        return tokens.contiguous(), targets.masked_fill(padding, IGNORE)


def _with_next(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of each token and the one after it, (2, tokens - 1): one copy for both."""
    return np.lib.stride_tricks.sliding_window_view(tokens, len(tokens) - 1)
