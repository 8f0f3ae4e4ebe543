"""The files of a folder, a glob, or a URL, plain or compressed."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data.corpora import File
from lockstep_gpt.data.tokenizer import library
from lockstep_gpt.extras.sources.blocks import BLOCK, DocumentsData, reading


@dataclass
class FilesData(DocumentsData):
    """Settings of corpora in files."""

    path: str = setting(
        "a file, a folder, a glob, or a URL; .gz and .zst are unpacked", "", on_resume="machine"
    )


class Files:
    """The files of a folder, a glob, or a URL, sorted by name.

    Raises:
        UserError: there are none, or the file system can't be read.
    """

    wanted: ClassVar[str] = ""  # pattern that the names of a folder's files must match

    def __init__(self, path: str) -> None:
        self.path = path
        self.open: Callable[..., Any] = open
        self.files = sorted(self.find(), key=lambda file: file.name)
        self.before = list(accumulate((file.size for file in self.files), initial=0))
        self.size: int | None = self.before[-1]

    def find(self) -> list[File]:
        """Find the files, unsorted."""
        import fsspec  # half of this module's import time, and not always needed

        with reading(f"data.path={self.path}"):
            system, place = fsspec.url_to_fs(self.path)  # expands ~ too
            is_folder = system.isdir(place)
            look = system.find if is_folder or system.exists(place) else system.glob
            found = [info for info in look(place, detail=True).values() if info["type"] == "file"]
        if "file" not in system.protocol:
            self.open = system.open
        base = place if is_folder else re.split(r"[*?\[]", place)[0].rpartition("/")[0]
        wanted = re.compile(rf"(?!\.|.*/\.).*{self.wanted}" if is_folder else "")  # none hidden
        files = []
        for info in found:
            name = info["name"].removeprefix(base).lstrip("/")
            stamp = info.get("mtime") or sorted(map(str, info.items()))
            if wanted.match(name):
                files.append(File(name, info["size"] or 0, stamp, info["name"]))
        if not files:
            raise UserError(f"data.path={self.path} matches no file; give a file, folder or glob")
        return files

    def identity(self) -> Any:
        """Return names, sizes, and modification times, or what else a server reports of files."""
        return [file[:3] for file in self.files]


def content(raw: Any, path: str, skip: int, size: int) -> Iterator[bytes]:
    """Yield a file's content, decompressed, without the first `skip` bytes, `size` at a time."""
    if path.endswith(".zst"):
        content = _unpacked(raw)
    elif path.endswith(".gz"):
        content = iter(partial(gzip.GzipFile(fileobj=raw).read, size), b"")
    else:
        raw.seek(skip)
        content, skip = iter(partial(raw.read, size), b""), 0
    for data in content:
        yield data[skip:]
        skip = max(0, skip - len(data))


def _unpacked(raw: Any) -> Iterator[bytes]:
    """Decompress all frames; zstandard's own reader accepts a truncated file."""
    zstandard = library("zstandard", "zstd")
    frame, data = None, raw.read(BLOCK)
    while data:
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        yield frame.decompress(data)
        data = frame.unused_data or raw.read(BLOCK)
    if frame and not frame.eof:
        raise EOFError("it is truncated")
