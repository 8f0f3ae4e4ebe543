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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
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
    total = sum(marks[number][1] for number in changed)
    with (
        tqdm(
            desc="comparing", total=total, unit="B", unit_scale=True, disable=None, delay=QUIET
        ) as bar,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):
        found = threads.map(lambda number: _sum(paths[number], bar), changed)
        for number, digest in zip(changed, found, strict=True):
            sums[places[number]] = digest
            _, _, *times = marks[number]
            known.pop(places[number], None)
            if max(times) < (time.time() - RECENT) * 1e9:
                known[places[number]] = (marks[number], digest)
    if changed:
        _remember(root)
    return [sums[place] for place in places]


def _mark(path: str) -> Mark:
    with reading(path):
        found = Path(path).stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _sum(path: str, bar: tqdm[Any]) -> str:
    digest = hashlib.sha256()
    with reading(path), Path(path).open("rb") as file:
        while piece := file.read(PIECE):
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
