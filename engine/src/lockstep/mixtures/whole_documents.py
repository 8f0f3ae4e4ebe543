"""Packs a prepared folder's windows with documents, once for a context length, and keeps them.

A mixture's folder has splits such as `code/train`; each is packed by itself.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError
from lockstep.mixtures.best_fit import (
    Numbers,
    Packed,
    ends_of_documents,
    windows_of,
)
from lockstep.settings import counted
from lockstep.tokens import shards
from lockstep.tokens.sealed_json import hash_of_file, read_sealed, write_sealed
from lockstep.tokens.tokenizer_choice import from_dict
from lockstep.whole_files import replacing, sync_folder

if TYPE_CHECKING:
    from lockstep.tokens.windows import Windows

logger = logging.getLogger(__name__)

FORMAT = 1  # of the files below; increase it with every change that other windows result from
INDEX = "index.json"
SETTING = "packing=documents"
LONGEST = 1 << 31  # tokens of a document


class WholeDocuments:
    """Packing of documents by best fit; `packing=documents` chooses it."""

    def prepare(self, folder: Path, block_size: int) -> None:
        """Pack the documents of a prepared folder, unless that was done; raises a `UserError`."""
        pack(folder, block_size)

    def open(self, folder: Path, split: str, block_size: int) -> Windows:
        """Return the windows of a split, or raise a `UserError`."""
        from lockstep.mixtures.packed_windows import (
            PackedWindows,  # needs torch
        )

        return PackedWindows(folder, split, block_size)

    def describe(self, folder: Path, block_size: int) -> str | None:
        """Return what the windows of training consist of."""
        return describe_training_windows(load(folder_within(folder, block_size)))


def end_of_text(folder: Path, wanted: str) -> int:
    """Return the token that ends a document, or raise a `UserError` that names the setting."""
    end = from_dict(shards.load_index(folder).tokenizer).end_of_text
    if end is None:
        raise UserError(
            f"{wanted} needs documents, and the tokens in {folder} have no end of text; "
            "leave it out"
        )
    return end


def folder_within(folder: Path, block_size: int) -> Path:
    """Return where a prepared folder keeps its windows of `block_size` tokens."""
    return folder / f"packed-{block_size}"


def pack(folder: Path, block_size: int) -> Path:
    """Return the folder with windows of `block_size` tokens; write it if nobody has.

    Raises a `UserError` if a file is damaged or cannot be written, or a document is too long.
    """
    packed = folder_within(folder, block_size)
    if not packed.is_dir():
        try:
            with packed.with_name(f".{packed.name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or this process ends
                if not packed.is_dir():
                    _write(folder, packed, block_size)
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}); packing=documents keeps its "
                "windows there, so make room, or permit it"
            ) from error
    check(packed)
    return packed


def check(packed: Path) -> None:
    """Compare each file with its SHA-256, or raise a `UserError`; they are far below the tokens."""
    for split in load(packed):
        open_pieces(packed, split)  # of a folder that an earlier version wrote, without SHA-256
    for name, sha256 in _index(packed).get("files", {}).items():
        try:
            is_same = hash_of_file(packed / name) == sha256
        except OSError as error:
            raise _unusable(packed, f"has {name}, which cannot be read") from error
        if not is_same:
            raise _unusable(packed, f"is damaged: {name} does not match its SHA-256")


def _write(folder: Path, packed: Path, block_size: int) -> None:
    """Write the windows of all splits; the folder appears when they are complete and on disk."""
    started = time.perf_counter()
    unfinished = packed.with_name(f".{packed.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir()
    try:
        facts_of_splits = _write_splits(folder, unfinished, block_size)
        unfinished.rename(packed)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder)
    for split, facts in facts_of_splits.items():
        if facts.empty:
            empty = f"{facts.empty:,} of {counted(facts.documents, 'document')}"
            logger.info("%s: %s have no text, only their end, which is kept", split, empty)
    seconds = time.perf_counter() - started
    logger.info(
        "packed %s in %.1f s: %s", packed, seconds, describe_training_windows(facts_of_splits)
    )


def _write_splits(folder: Path, unfinished: Path, block_size: int) -> dict[str, Packed]:
    end = end_of_text(folder, SETTING)
    index = shards.load_index(folder)
    shards.check_content(folder, index)  # these windows stay when damaged tokens are repaired
    facts_of_splits = {}
    files = {}
    for split, content in index.splits.items():
        if not content.shards:  # of a mixture: the sum over its sources
            continue
        ends = ends_of_documents(np.asarray(shards.open_split(folder, split)), end)
        _refuse_endless_ones(ends, folder, split, end)
        starts, lengths, first, facts = windows_of(ends, block_size)
        facts_of_splits[split] = facts
        for name, values in (("starts", starts), ("lengths", lengths), ("first", first)):
            path = _file(unfinished, split, name)
            with replacing(path) as file:
                np.save(file, values)
            files[path.name] = hash_of_file(path)
    splits = {name: asdict(facts) for name, facts in facts_of_splits.items()}
    write_sealed(unfinished / INDEX, {"format": FORMAT, "splits": splits, "files": files})
    return facts_of_splits


def _file(packed: Path, split: str, name: str) -> Path:
    return packed / f"{split.replace('/', '-')}-{name}.npy"


def load(packed: Path) -> dict[str, Packed]:
    """Return what each split's windows consist of, or raise a `UserError`."""
    values = _index(packed)
    try:
        if values["format"] == FORMAT:
            return {name: Packed(**facts) for name, facts in values["splits"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unusable(packed, "is damaged") from error
    raise _unusable(packed, f"has format {values['format']}, this version reads {FORMAT}")


def _index(packed: Path) -> dict[str, Any]:
    try:
        return read_sealed(packed / INDEX)
    except (OSError, ValueError) as error:
        raise _unusable(packed, "is damaged") from error


def describe_training_windows(packed: dict[str, Packed]) -> str:
    """Describe the training windows in one line, those of a mixture by source."""
    lines = []
    for name, facts in packed.items():
        source, _, split = name.rpartition("/")
        if split == "train":
            lines.append(f"{source}: {facts}" if source else str(facts))
    return "; ".join(lines)


def open_pieces(packed: Path, split: str) -> tuple[Numbers, npt.NDArray[np.int32], Numbers]:
    """Memory-map a split's pieces: where each begins in the tokens, its length, and `first`.

    `first`, (windows + 1), is the number of each window's first piece. Raises a `UserError`.
    """
    facts = load(packed)[split]
    try:
        names = ("starts", "lengths", "first")
        arrays = [np.load(_file(packed, split, name), mmap_mode="r") for name in names]
    except Exception as error:  # NumPy raises any error for a damaged header
        raise _unusable(packed, "is damaged") from error
    if [array.ndim for array in arrays] != [1, 1, 1]:
        raise _unusable(packed, "is damaged")
    if [len(array) for array in arrays] != [facts.pieces, facts.pieces, facts.windows + 1]:
        raise _unusable(packed, "is damaged")
    starts, lengths, first = arrays
    return starts, lengths, first


def _unusable(packed: Path, reason: str) -> UserError:
    return UserError(f"{packed} {reason}; delete that folder, and start again")


def _refuse_endless_ones(ends: Numbers, folder: Path, split: str, end: int) -> None:
    lengths = np.diff(ends, prepend=0)
    longest = int(lengths.argmax())
    if lengths[longest] > LONGEST:
        start = int(ends[longest] - lengths[longest])
        raise UserError(
            f"{folder}: a document of {lengths[longest]:,} tokens begins at token {start:,} of "
            f"{split}, and packing=documents takes at most {LONGEST:,}; check that token "
            f"{end} ends documents there, or set packing=stream"
        )
