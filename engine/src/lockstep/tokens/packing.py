"""How tokens fill windows, the samples; a YAML file in configs/packing/ names a class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
