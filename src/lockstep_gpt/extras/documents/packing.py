"""Places documents in windows: best fit, once for a prepared folder and a context length.

A mixture's folder has splits such as `code/train`; each is packed by itself.

A window has T tokens. A longer document first fills whole windows; what remains of it, and every
shorter document, goes where the least space stays free, the longest first (best-fit decreasing:
Johnson 1974; for language models Ding et al. 2024, "Fewer Truncations Improve Language Modeling").
Each token but a split's last is in one window, with the next token of the file as its target.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_gpt.config import Config, UserError, counted
from lockstep_gpt.data import shards
from lockstep_gpt.data.prepare import folder_of
from lockstep_gpt.data.tokenizer import from_dict
from lockstep_gpt.extras.documents.documents_settings import is_packed
from lockstep_gpt.whole_files import replace_text, replacing, sync_folder

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]

FORMAT = 1  # of the files below; increase it with every change that other windows result from
INDEX = "index.json"
LONGEST = 1 << 31  # tokens of a document
SCANNED = 1 << 26  # tokens that are searched at once for ends of documents


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
        begin, padding = self.whole / self.windows, self.padding / (self.windows * self.size)
        return (
            f"{counted(self.documents, 'document')} in {counted(self.windows, 'window')}, of which "
            f"{begin:.1%} begin with a document; {padding:.2%} padding, no token lost"
        )


def pack_if_asked(folder: Path, config: Config) -> None:
    """Pack the documents of a prepared folder, before ranks start, if `data.packing` says so.

    Raises a `UserError` if a setting of this extra needs documents and the tokenizer has no end.
    """
    if getattr(config.model, "mask_documents", False):
        end_of_text(folder, "model.mask_documents=true")
    if is_packed(config.data):
        pack(folder, config.model.block_size)


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
                f"{folder} cannot be written ({error.strerror}); data.packing=documents keeps its "
                "windows there, so make room, or permit it"
            ) from error
    return packed


def _write(folder: Path, packed: Path, block_size: int) -> None:
    """Write the windows of all splits; the folder appears when they are complete and on disk."""
    started, unfinished = time.perf_counter(), packed.with_name(f".{packed.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir()
    try:
        found = _write_splits(folder, unfinished, block_size)
        unfinished.rename(packed)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder)
    for split, facts in found.items():
        if facts.empty:
            empty = f"{facts.empty:,} of {counted(facts.documents, 'document')}"
            logger.info("%s: %s have no text, only their end, which is kept", split, empty)
    seconds = time.perf_counter() - started
    logger.info("packed %s in %.1f s: %s", packed, seconds, described(found))


def _write_splits(folder: Path, unfinished: Path, block_size: int) -> dict[str, Packed]:
    end, found = end_of_text(folder, "data.packing=documents"), {}
    for split, content in shards.load_index(folder).splits.items():
        if not content.shards:  # of a mixture: the sum over its sources
            continue
        ends = ends_of_documents(np.asarray(shards.open_split(folder, split)), end)
        _refuse_endless_ones(ends, folder, split, end)
        starts, lengths, first, found[split] = windows_of(ends, block_size)
        for name, values in (("starts", starts), ("lengths", lengths), ("first", first)):
            with replacing(_file(unfinished, split, name)) as file:
                np.save(file, values)
    index = {"format": FORMAT, "splits": {name: asdict(each) for name, each in found.items()}}
    replace_text(unfinished / INDEX, json.dumps(index, indent=1))
    return found


def _file(packed: Path, split: str, name: str) -> Path:
    return packed / f"{split.replace('/', '-')}-{name}.npy"


def load(packed: Path) -> dict[str, Packed]:
    """Return what each split's windows consist of, or raise a `UserError`."""
    try:
        values = json.loads((packed / INDEX).read_bytes())
        if values["format"] == FORMAT:
            return {name: Packed(**each) for name, each in values["splits"].items()}
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unusable(packed, "is damaged") from error
    raise _unusable(packed, f"has format {values['format']}, this version reads {FORMAT}")


def parts(packed: Iterable[str], split: str) -> list[str]:
    """Return which of the packed splits together are train or val: in a mixture, each source's."""
    return [name for name in packed if name.rpartition("/")[2] == split]


def described(packed: dict[str, Packed]) -> str:
    """Describe the training windows in one line, those of a mixture by source."""
    sources = {name: name.rpartition("/")[0] for name in parts(packed, "train")}
    return "; ".join(
        f"{own}: {packed[name]}" if own else str(packed[name]) for name, own in sources.items()
    )


def opened(packed: Path, split: str) -> tuple[Numbers, npt.NDArray[np.int32], Numbers]:
    """Memory-map a split's pieces: where each begins in the tokens, its length, and `first`.

    `first`, (windows + 1), is the number of each window's first piece. Raises a `UserError`.
    """
    facts = load(packed)[split]
    try:
        names = ("starts", "lengths", "first")
        arrays = [np.load(_file(packed, split, name), mmap_mode="r") for name in names]
    except (OSError, ValueError, EOFError) as error:
        raise _unusable(packed, "is damaged") from error
    if [len(each) for each in arrays] != [facts.pieces, facts.pieces, facts.windows + 1]:
        raise _unusable(packed, "is damaged")
    starts, lengths, first = arrays
    return starts, lengths, first


def _unusable(packed: Path, reason: str) -> UserError:
    return UserError(f"{packed} {reason}; delete that folder, and start again")


def ends_of_documents(tokens: npt.NDArray[Any], end: int) -> Numbers:
    """Return the place after each document, (documents,); the last may lack its end of text."""
    found = [
        np.flatnonzero(tokens[place : place + SCANNED] == end) + place + 1
        for place in range(0, len(tokens), SCANNED)
    ]
    ends = np.concatenate(found)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _refuse_endless_ones(ends: Numbers, folder: Path, split: str, end: int) -> None:
    lengths = np.diff(ends, prepend=0)
    longest = int(lengths.argmax())
    if lengths[longest] > LONGEST:
        begin = int(ends[longest] - lengths[longest])
        raise UserError(
            f"{folder}: a document of {lengths[longest]:,} tokens begins at token {begin:,} of "
            f"{split}, and data.packing=documents takes at most {LONGEST:,}; check that token "
            f"{end} ends documents there, or set data.packing=stream"
        )


def windows_of(ends: Numbers, size: int) -> tuple[Numbers, npt.NDArray[np.int32], Numbers, Packed]:
    """Place documents that end before `ends` in windows of `size` tokens.

    Returns the place and length of each piece, (pieces,), in the order of windows; the number of
    each window's first piece, (windows + 1,); and the facts. In a window, documents come before
    remains of long ones, and a document without its end of text is the last: it would continue.
    """
    documents = np.diff(ends, prepend=0)
    begins, lengths = ends - documents, documents.copy()
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
    whole = np.isin(firsts, begins).sum()
    padding = len(counts) * size - int(lengths.sum())
    empty = int((documents == 1).sum())
    facts = Packed(size, len(counts), len(starts), padding, len(documents), empty, int(whole))
    return starts, pieces, first, facts


def best_fit(lengths: Numbers, size: int) -> tuple[Numbers, int]:
    """Return the bin of each of `lengths`, which are 1 to `size`, and the number of bins.

    Best-fit decreasing, for all pieces of one length and all bins with one free space at a time.
    """
    bins, made = np.empty(len(lengths), np.int64), 0
    order = np.argsort(-lengths, kind="stable")
    free: dict[int, list[Numbers]] = {}  # space -> bins with it
    spaces: list[int] = []  # its keys, ascending

    def put(space: int, those: Numbers) -> None:
        if space and len(those):
            if space not in free:
                insort(spaces, space)
            free.setdefault(space, []).append(those)

    for same in _equal(lengths[order]):
        items = order[same]
        length, at = int(lengths[items[0]]), 0
        while at < len(items):
            place = bisect_left(spaces, length)
            space = spaces.pop(place) if place < len(spaces) else size
            each = space // length  # all go into the fullest bin, until it has no space for more
            wanted = -(-(len(items) - at) // each)
            if space in free:
                those = np.concatenate(free.pop(space))
                put(space, those[wanted:])
            else:
                those = np.arange(made, made + wanted)
                made += wanted
            those = those[:wanted]
            taken = items[at : at + wanted * each][: len(those) * each]
            bins[taken] = np.repeat(those, each)[: len(taken)]
            at += len(taken)
            filled, rest = divmod(len(taken), each)
            put(space - each * length, those[:filled])
            put(space - rest * length, those[filled:])
    return bins, made


def _equal(ordered: Numbers) -> Iterator[slice]:
    """Yield a slice for each value of an ordered array."""
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for begin, end in pairwise(edges):
        if begin < end:
            yield slice(begin, end)


def receipt_line(config: Config, _batch: Any) -> dict[str, str]:
    """Return the receipt's line about the windows of a run with `data.packing=documents`."""
    if not is_packed(config.data):
        return {}
    packed = folder_within(folder_of(config.data), config.model.block_size)
    return {"packing": described(load(packed))}
