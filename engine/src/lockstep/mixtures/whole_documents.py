"""Packs a prepared folder's windows with documents, once for a context length, and keeps them.

A mixture's folder has splits such as `code/train`; each is packed by itself.

Documents are placed in windows of T tokens by best fit. A longer document first fills whole
windows; what remains of it, and every shorter document, goes where the least space stays free, the
longest first (best-fit decreasing: Johnson 1974; for language models Ding et al. 2024, "Fewer
Truncations Improve Language Modeling"). Each token but a split's last is in one window, with the
next token of the file as its target.
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import UserError
from lockstep.file_systems import lacks_maps, remedy
from lockstep.settings import counted
from lockstep.tokens import shards
from lockstep.tokens.prepare import only_builder
from lockstep.tokens.shards import hash_of_file, read_sealed, write_sealed
from lockstep.tokens.tokenizer_choice import from_dict
from lockstep.whole_files import put_in_place, replacing

if TYPE_CHECKING:
    from lockstep.tokens.windows import Windows

logger = logging.getLogger(__name__)

FORMAT = 1  # of the files below; increase it with every change that other windows result from
INDEX = "index.json"
SETTING = "packing=documents"
LONGEST = 1 << 31  # tokens of a document
Numbers = npt.NDArray[np.int64]
SCANNED = 1 << 26  # tokens that are searched at once for ends of documents


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
            lock = packed.with_name(f".{packed.name}.lock")
            with only_builder(lock, folder.parent) as is_locked:
                # Without locks, all ranks write these windows, each into its own folder.
                own = f".{socket.gethostname()}-{threading.get_native_id()}"
                name = f".{packed.name}{'' if is_locked else own}.unfinished"
                if not packed.is_dir():
                    _write(folder, packed, block_size, packed.with_name(name))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}), where packing=documents keeps its "
                f"windows; {remedy(error, 'data.root')}"
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


def _write(folder: Path, packed: Path, block_size: int, unfinished: Path) -> None:
    """Write the windows of all splits; the folder appears when they are complete and on disk."""
    started = time.perf_counter()
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir()
    try:
        facts_of_splits = _write_splits(folder, unfinished, block_size)
        if not put_in_place(unfinished, packed):
            return
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
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
        arrays = [_loaded(_file(packed, split, name)) for name in ("starts", "lengths", "first")]
    except Exception as error:  # NumPy raises any error for a damaged header
        raise _unusable(packed, "is damaged") from error
    if [array.ndim for array in arrays] != [1, 1, 1]:
        raise _unusable(packed, "is damaged")
    if [len(array) for array in arrays] != [facts.pieces, facts.pieces, facts.windows + 1]:
        raise _unusable(packed, "is damaged")
    starts, lengths, first = arrays
    return starts, lengths, first


def _loaded(path: Path) -> npt.NDArray[Any]:
    """Memory-map an array, or read it, where a disk has no maps: it is far below the tokens."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except OSError as error:
        if not lacks_maps(error):
            raise
        array = np.load(path)
    return array


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


@dataclass(frozen=True)
class Packed:
    """What a split's windows consist of."""

    size: int  # tokens of a window
    windows: int
    pieces: int  # documents, and parts of long ones
    padding: int  # places in windows without a token
    documents: int
    empty: int  # of these, with no token but their end
    whole: int  # windows that begin with a document

    def __str__(self) -> str:
        """Describe the windows in one line."""
        whole = self.whole / self.windows
        padding = self.padding / (self.windows * self.size)
        return (
            f"{counted(self.documents, 'document')} in {counted(self.windows, 'window')}, of which "
            f"{whole:.1%} begin with a document; {padding:.2%} padding, no token lost"
        )


def ends_of_documents(tokens: npt.NDArray[Any], end: int) -> Numbers:
    """Return the place after each document, (documents,); the last may lack its end of text."""
    ends_in_stretches = [
        np.flatnonzero(tokens[place : place + SCANNED] == end) + place + 1
        for place in range(0, len(tokens), SCANNED)
    ]
    ends: Numbers = np.concatenate(ends_in_stretches)
    if len(ends) and ends[-1] == len(tokens):
        return ends
    return np.append(ends, len(tokens))


def windows_of(ends: Numbers, size: int) -> tuple[Numbers, npt.NDArray[np.int32], Numbers, Packed]:
    """Place documents that end before `ends` in windows of `size` tokens.

    Returns the place and length of each piece, (pieces,), in the order of windows; the number of
    each window's first piece, (windows + 1,); and the facts. In a window, documents come before
    remains of long ones, and a document without its end of text is the last: it would continue.
    """
    documents = np.diff(ends, prepend=0)
    begins = ends - documents
    lengths = documents.copy()
    lengths[-1] -= 1  # the split's last token is only a target
    full, rest = np.divmod(lengths, size)
    number = np.arange(full.sum()) - np.repeat(full.cumsum() - full, full)  # in its document
    cut = np.repeat(begins, full) + number * size
    left = np.flatnonzero(rest)
    bins, more = best_fit(rest[left], size)
    late = (full[left] > 0).astype(np.int8)
    late[left == len(lengths) - 1] = 2
    order = np.lexsort((left, late, bins))
    starts = np.concatenate([cut, (begins + full * size)[left][order]])
    pieces = np.concatenate([np.full(len(cut), size), rest[left][order]]).astype(np.int32)
    counts = np.concatenate([np.ones(len(cut), np.int64), np.bincount(bins, minlength=more)])
    first = np.concatenate([[0], counts.cumsum()])
    firsts = starts[first[:-1]]
    unbroken = np.isin(firsts, begins).sum()  # windows that begin with a document
    padding = len(counts) * size - int(lengths.sum())
    empty = int((documents == 1).sum())
    facts = Packed(size, len(counts), len(starts), padding, len(documents), empty, int(unbroken))
    return starts, pieces, first, facts


def best_fit(lengths: Numbers, size: int) -> tuple[Numbers, int]:
    """Return the bin of each of `lengths`, which are 1 to `size`, and the number of bins.

    Best-fit decreasing, for all pieces of one length and all bins with one free space at a time.
    """
    bins = np.empty(len(lengths), np.int64)
    made = 0  # bins
    order = np.argsort(-lengths, kind="stable")
    free: dict[int, list[Numbers]] = {}  # space -> bins with it
    spaces: list[int] = []  # its keys, ascending

    def put(space: int, bins_with_it: Numbers) -> None:
        if space and len(bins_with_it):
            if space not in free:
                insort(spaces, space)
            free.setdefault(space, []).append(bins_with_it)

    for same in _equal(lengths[order]):
        items = order[same]
        length = int(lengths[items[0]])
        placed = 0  # items that have a bin
        while placed < len(items):
            # All go into the fullest bins that have space, or into new ones.
            place = bisect_left(spaces, length)
            space = size
            if place < len(spaces):
                space = spaces.pop(place)
            per_bin = space // length  # until it has no space for more
            wanted = -(-(len(items) - placed) // per_bin)
            if space in free:
                candidates = np.concatenate(free.pop(space))
                put(space, candidates[wanted:])
            else:
                candidates = np.arange(made, made + wanted)
                made += wanted
            chosen = candidates[:wanted]
            taken = items[placed : placed + wanted * per_bin][: len(chosen) * per_bin]
            bins[taken] = np.repeat(chosen, per_bin)[: len(taken)]
            placed += len(taken)
            filled, rest = divmod(len(taken), per_bin)
            put(space - per_bin * length, chosen[:filled])
            put(space - rest * length, chosen[filled:])
    return bins, made


def _equal(ordered: Numbers) -> Iterator[slice]:
    """Yield a slice for each value of an ordered array."""
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for start, end in pairwise(edges):
        if start < end:
            yield slice(start, end)
