"""Windows that are packed from whole documents; see `whole_documents` for their files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.shards import load_index, open_split
from lockstep_gpt.data.windows import Batch, Stored
from lockstep_gpt.extras.datasets import whole_documents
from lockstep_gpt.model.functional import IGNORE


class PackedWindows:
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

    def gather(self, batches: Sequence[Positions], pinned: bool = False) -> Iterator[Stored]:
        """Copy the windows with these numbers and yield each batch, (B, 2, T); -1 is padding."""
        for rows in batches:
            stored = np.full((len(rows), 2, self.block_size), self.filler, self.dtype)
            real = np.zeros(len(rows), np.int64)
            for row, window in enumerate(rows.tolist()):
                if window >= 0:
                    real[row] = self._fill(stored[row], window)
            ids = torch.from_numpy(stored)
            yield Stored(ids.pin_memory() if pinned else ids, torch.from_numpy(real))

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
