"""The windows that are held out from training, and the loaders that evaluate on them."""

from collections.abc import Mapping
from pathlib import Path

from lightning import Trainer

from lockstep.loading.loaders import EvalLoader, Joined, Sized, eval_loader
from lockstep.settings import check_whole
from lockstep.tokens import shards
from lockstep.tokens.packing import Packing, Stream
from lockstep.tokens.windows import SpreadWindows, Windows


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
    index = shards.load_index(folder)
    shards.check_block_size(index, block_size)
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
