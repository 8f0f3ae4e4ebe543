"""The prepared tokens that a data module takes its windows from, and how they are packed.

A YAML file in configs/packing/ names a class of packing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import UserError
from lockstep.settings import check_whole
from lockstep.tokens.prepare import Run, prepare_once
from lockstep.tokens.shards import check_block_size, load_index
from lockstep.tokens.sources.source import Source
from lockstep.tokens.tokenizer_choice import encode_alike, from_dict

if TYPE_CHECKING:
    from lightning import Trainer

    from lockstep.loading.loaders import EvalLoader, Joined, Sized
    from lockstep.tokens.windows import Windows


class Packing(Protocol):
    """Makes the windows of a prepared folder."""

    def prepare(self, folder: Path, block_size: int) -> None:
        """Do once, in one of a machine's processes, what `open` needs, or raise a `UserError`."""

    def open(self, folder: Path, split: str, block_size: int) -> Windows:
        """Return the windows of a split, or raise a `UserError`."""

    def describe(self, folder: Path, block_size: int) -> str | None:
        """Return what the receipt of a run says of the windows, if anything."""


class Stream:
    """Packing in which each window continues where the one before it ends."""

    def prepare(self, folder: Path, block_size: int) -> None:
        """Do nothing: the token files are enough."""

    def open(self, folder: Path, split: str, block_size: int) -> Windows:
        """Return the windows of a split, or raise a `UserError`."""
        from lockstep.tokens.windows import StreamWindows  # needs torch

        return StreamWindows(folder, split, block_size)

    def describe(self, folder: Path, block_size: int) -> str | None:
        """Return None: there is nothing to say."""
        return None


class Prepared:
    """The tokens of a source in a folder on disk, and their windows; prepares them once.

    Args:
        source: of the text, or of tokens.
        block_size: tokens of a window, T.
        packing: how tokens fill windows; None: each continues where the one before it ends.
        run: decides once which tokens these are; None: there is none.

    Attributes:
        folder: has the tokens.
        windows: a split, such as `train` and `val` -> its windows.
        tokenizer: of the tokens.
        fingerprint: of the tokens; it tells them from others.

    Raises:
        UserError: a setting of the source is wrong, or a split is too short for a window.
    """

    def __init__(
        self,
        source: Source,
        block_size: int,
        packing: Packing | None = None,
        run: Run | None = None,
    ) -> None:
        self.folder = prepare_once(source, run)
        self.block_size = block_size
        self._packing = packing or Stream()
        self.windows = open_windows(self.folder, block_size, self._packing)
        index = load_index(self.folder)
        self.fingerprint = index.fingerprint
        self.tokenizer = from_dict(index.tokenizer)
        self._test_settings = index.test_settings

    def to_validate(self, most_tokens: int | None) -> dict[str, int]:
        """Return how many windows of each part of the corpus to validate on.

        Args:
            most_tokens: in all, in whole windows, at least one of each part; None: all.
        """
        return counts_within(self.windows["val"].counts, most_tokens, self.block_size)

    def eval_loader(
        self,
        split: str,
        batch: Sized | int,
        trainer: Trainer | None,
        used: Mapping[str, int] | None = None,
    ) -> Joined:
        """Return batches that contain each used window of a split once across all ranks.

        Args:
            split: such as `val`.
            batch: as in `lockstep.eval_loader`.
            trainer: of the data module.
            used: how many windows of each part; None: all.

        Raises:
            UserError: there is no such split.
        """
        if split not in self.windows:
            raise UserError(
                f"{self.folder} has no {split} split; prepare one with {self._test_settings()}"
            )
        windows = self.windows[split]
        return eval_loaders(windows, windows.counts if used is None else used, batch, trainer)

    def bits_per_byte(self, split: str, loss: float, targets: int) -> float | None:
        """Return how well a text is compressed.

        Args:
            split: that was measured, such as `val`.
            loss: its mean, in nats per token.
            targets: how many tokens the mean is over.

        Returns:
            None if the split is no text, or not all of its tokens are targets: the number of bytes
            is known only for all of them together.
        """
        index = load_index(self.folder)
        parts = [index.splits[name] for name in index.parts(split).values()]
        windows = sum(self.windows[split].counts.values())
        whole = (windows * self.block_size, sum(part.tokens - 1 for part in parts))
        text_bytes = index.splits[split].text_bytes
        if not text_bytes or targets not in whole:
            return None
        return loss / math.log(2) * (index.splits[split].tokens / text_bytes)

    def state(self) -> dict[str, Any]:
        """Return what checkpoints say of the tokens."""
        return {"tokenizer": self.tokenizer.to_dict(), "fingerprint": self.fingerprint}

    def refuse_other(self, state: Mapping[str, Any], force: bool = False) -> None:
        """Raise a `UserError` if a checkpoint is of a run on other tokens.

        Args:
            state: of the checkpoint.
            force: let it have other tokens, but of the same tokenizer: other ids are other text.
        """
        if state["fingerprint"] == self.fingerprint:
            return
        if not encode_alike(from_dict(state["tokenizer"]), self.tokenizer):
            raise UserError(
                f"the checkpoint is of a run with another tokenizer than that of {self.folder}; "
                "set tokenizer as that run did, or, if it was learned, to the folder of its tokens"
            )
        if not force:
            raise UserError(
                f"the checkpoint is of a run on other tokens than {self.folder}; to train on them, "
                f"set data.fingerprint={state['fingerprint']}, or resume_force=true"
            )

    def receipt_lines(self, validated: Mapping[str, int]) -> dict[str, str]:
        """Return what the receipt of a run says of the data and the windows.

        Args:
            validated: how many windows of each part are validated on.
        """
        train = f"{len(self.windows['train']):,} windows to train on"
        lines = {"data": f"{self.folder}, {train}, {sum(validated.values()):,} to validate on"}
        packing = self._packing.describe(self.folder, self.block_size)
        return {**lines, "packing": packing} if packing else lines


def open_windows(
    folder: Path, block_size: int, packing: Packing | None = None
) -> dict[str, Windows]:
    """Return the windows of each split of a prepared folder, such as `train` and `val`.

    Args:
        folder: what `prepare` returned.
        block_size: tokens of a window, T.
        packing: makes the windows; None: a stream.

    Raises:
        UserError: the folder is damaged, or a split is too short for a window.
    """
    index = load_index(folder)
    check_block_size(index, block_size)
    packing = packing or Stream()
    packing.prepare(folder, block_size)
    splits = [name for name in index.splits if "/" not in name]
    return {name: packing.open(folder, name, block_size) for name in splits}


def counts_within(counts: Mapping[str, int], tokens: int | None, block_size: int) -> dict[str, int]:
    """Return how many windows of each part to validate on.

    Args:
        counts: windows of each part of the corpus.
        tokens: most tokens in all, in whole windows, at least one of each part; None: all.
        block_size: tokens of a window.
    """
    if tokens is None:
        return dict(counts)
    check_whole("val_tokens", tokens, at_least=1)
    most = max(1, tokens // len(counts) // block_size)
    return {name: min(most, size) for name, size in counts.items()}


def eval_loaders(
    windows: Windows, used: Mapping[str, int], batch: Sized | int, trainer: Trainer | None
) -> Joined:
    """Return batches that have each used window once across all ranks, one part after another.

    Args:
        windows: of a split.
        used: how many windows of each part to spread evenly over it.
        batch: as in `eval_loader`.
        trainer: of the data module.
    """
    # Late: a command that only prepares the tokens needs no torch.
    from lockstep.loading.loaders import Joined, eval_loader
    from lockstep.tokens.windows import SpreadWindows

    loaders: list[EvalLoader] = []
    first = 0
    for name, size in windows.counts.items():
        loader = eval_loader(
            SpreadWindows(windows, first, size, used[name]),
            batch,
            trainer,
            pad=windows.pad,
            collate=windows.collate,
            workers="thread",
        )
        loaders.append(loader)
        first += size
    return Joined(loaders)
