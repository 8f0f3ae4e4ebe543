"""The prepared tokens that a data module takes its windows from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.tokens.held_out import counts_within, eval_loaders, open_windows
from lockstep.tokens.packing import Packing, Stream
from lockstep.tokens.prepare import Run, prepare_once
from lockstep.tokens.shards import load_index
from lockstep.tokens.sources.source import Source
from lockstep.tokens.tokenizer_choice import from_dict

if TYPE_CHECKING:
    from lightning import Trainer

    from lockstep.loading.loaders import Joined, Sized


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

    def refuse_other(self, state: Mapping[str, Any]) -> None:
        """Raise a `UserError` if a checkpoint is of a run on other tokens."""
        if state["fingerprint"] != self.fingerprint:
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
