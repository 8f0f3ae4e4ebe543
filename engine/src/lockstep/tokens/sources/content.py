"""What local files contain: a SHA-256 for each, so that a copy of a corpus is the same corpus.

Sums are remembered next to the prepared tokens, by what the file system knows of each file, so a
file is read again only if it has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

from tqdm import tqdm

from lockstep.tokens.sources.source import reading
from lockstep.whole_files import replace_text

REMEMBERED = ".sha256.json"  # in `data.root`
# A file that changed as short a time ago may change again without another time.
RECENT = 2.0  # seconds
PIECE = 1 << 20  # bytes
QUIET = 2.0  # seconds before a progress bar appears

Mark = list[int]  # inode, bytes, times of change of the content and of the file, in ns


def sums_of(paths: Sequence[str], root: str) -> list[str]:
    """Return the SHA-256 of each local file, in hex.

    Args:
        paths: the files.
        root: the folder of prepared tokens; if it exists, sums are remembered there.

    Raises:
        UserError: a file can't be read.
    """
    known = _known(root)
    places = [str(Path(path).absolute()) for path in paths]
    marks = [_mark(path) for path in paths]
    changed = [
        number
        for number, (place, mark) in enumerate(zip(places, marks, strict=True))
        if known.get(place, ([], ""))[0] != mark
    ]
    sums = {place: known[place][1] for place in places if place in known}
    read = _sums([paths[number] for number in changed], sum(marks[n][1] for n in changed))
    for number, digest in zip(changed, read, strict=True):
        place = places[number]
        sums[place] = digest
        known.pop(place, None)
        _, _, *times = marks[number]
        if max(times) < (time.time() - RECENT) * 1e9:
            known[place] = (marks[number], digest)
    if changed:
        _remember(root)
    return [sums[place] for place in places]


def _sums(paths: Sequence[str], total: int) -> list[str]:
    """Read files, of `total` bytes, in threads, until all are read or one can't be."""
    ended = Event()
    threads = ThreadPoolExecutor(os.cpu_count())
    with tqdm(
        desc="comparing", total=total, unit="B", unit_scale=True, disable=None, delay=QUIET
    ) as bar:
        try:
            futures = [threads.submit(_sum, path, bar, ended) for path in paths]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises its exception
            return [future.result() for future in futures]
        finally:  # also after a signal
            ended.set()
            threads.shutdown(cancel_futures=True)


def _mark(path: str) -> Mark:
    with reading(path):
        found = Path(path).stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _sum(path: str, bar: tqdm[Any], ended: Event) -> str:
    digest = hashlib.sha256()
    with reading(path), Path(path).open("rb") as file:
        while not ended.is_set() and (piece := file.read(PIECE)):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()


@cache
def _known(root: str) -> dict[str, tuple[Mark, str]]:
    """Return the sums that are remembered in a folder, which this process adds to."""
    try:
        values = json.loads((Path(root).expanduser() / REMEMBERED).read_text("utf-8"))
        return {str(path): (list(mark), str(digest)) for path, (mark, digest) in values.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or damaged: read again
        return {}


def _remember(root: str) -> None:
    folder = Path(root).expanduser()
    if folder.is_dir():
        with contextlib.suppress(OSError):  # without them, the files are only read again
            replace_text(folder / REMEMBERED, json.dumps(_known(root)))
