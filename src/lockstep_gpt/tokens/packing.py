"""How windows are made of a prepared folder; a YAML file in configs/packing/ names a class."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

from lockstep_gpt.errors import UserError

if TYPE_CHECKING:
    from lockstep_gpt.tokens.windows import Windows


class Packing(Protocol):
    """Makes the windows of a prepared folder."""

    def prepare(self, folder: Path, block_size: int) -> None:
        """Do once, before ranks start, what `open` needs; raise a `UserError` if that fails."""

    def open(self, folder: Path, split: str, block_size: int) -> Windows:
        """Return the windows of a split, or raise a `UserError`."""

    def describe(self, folder: Path, block_size: int) -> str | None:
        """Return what the receipt of a run says of the windows, if anything."""


def packing_of(target: str) -> Packing:
    """Return the packing that `packing._target_` names; of an empty name, a stream's.

    Raises:
        UserError: there is no such class.
    """
    if not target:
        return Stream()
    try:
        packing: Packing = resolve_name(target)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"packing._target_={target} cannot be made ({error}); choose packing=stream"
        ) from error
    return packing


class Stream:
    """Packing in which each window continues where the one before it ends."""

    def prepare(self, folder: Path, block_size: int) -> None:
        """Do nothing: the token files are enough."""

    def open(self, folder: Path, split: str, block_size: int) -> Windows:
        """Return the windows of a split, or raise a `UserError`."""
        from lockstep_gpt.tokens.windows import StreamWindows  # needs torch

        return StreamWindows(folder, split, block_size)

    def describe(self, folder: Path, block_size: int) -> str | None:
        """Return None: there is nothing to say."""
        return None
