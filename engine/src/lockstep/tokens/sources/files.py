"""The files of a folder, a glob, or a URL, plain or compressed."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.optional import import_optional
from lockstep.settings import counted
from lockstep.tokens.sources.local_files import LocalFiles
from lockstep.tokens.sources.remote_files import find_file_system, open_remote
from lockstep.tokens.sources.source import BLOCK, reading

# Ending of a file's name -> the choice of `data` for it.
CHOICES = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "shards",
}


class File(NamedTuple):
    """One file of a corpus."""

    name: str  # relative to the path that the user gave, so the corpus can move
    size: int
    stamp: Any  # changes with the content, as far as the file system reports it
    path: str
    split: str | None = None  # None: its documents are divided


@dataclass
class Files:
    """Files of one split, sorted by name, or files whose documents are divided."""

    files: list[File]
    open: Callable[..., Any] = open  # files of a server aren't on this machine
    split: str | None = None  # None: divided

    def identity(self) -> Any:
        """Return names, sizes, and modification times, or what else a server reports of files."""
        return [file[:3] for file in self.files]


def find_files(
    path: str,
    wanted: str = "",
    setting: str = "data.source.path",
    split: str | None = None,
) -> Files:
    """Return the files of a folder, a glob, or a URL.

    Args:
        path: the folder, glob, file, or URL.
        wanted: pattern that the names of a folder's files must match.
        setting: the setting that the path is from.
        split: the split of all the files; None: their documents are divided.

    Raises:
        UserError: there are none, or a folder or a link can't be read.
    """
    if not path:
        raise UserError(f"{setting} is empty; set it to a file, a folder, a glob, or a URL")
    with reading(f"{setting}={path}"):
        system, place = find_file_system(path, setting)
        is_folder = system.isdir(place)
        is_here = "file" in system.protocol
        infos = _listed(system, place, is_folder, is_here)
    if is_folder:
        base = place
        pattern = re.compile(rf"(?!\.|.*/\.).*{wanted}")  # none hidden
    else:
        base = re.split(r"[*?\[]", place)[0].rpartition("/")[0]
        pattern = re.compile("")
    files = []
    for info in infos:
        name = info["name"].removeprefix(base).lstrip("/")
        if not pattern.match(name):
            continue
        if info["type"] == "other" and is_here:
            raise _no_file(info["name"])
        if info["type"] == "file":
            stamp = info.get("mtime") or sorted(map(str, info.items()))
            files.append(File(name, info["size"] or 0, stamp, info["name"], split))
    if not files:
        with reading(f"{setting}={path}"):
            _raise_cause(system, place, is_here)
        raise UserError(f"{setting}={path} {_what_instead(infos, wanted)}")
    files.sort(key=lambda file: file.name)
    opener = open if is_here else partial(_open_remote, system)
    return Files(files, opener, split)


def _what_instead(infos: list[dict[str, Any]], wanted: str) -> str:
    """Say what a folder contains if it has no file whose name matches `wanted`."""
    names = sorted(info["name"] for info in infos if info["type"] == "file")
    if not names or not wanted:
        return "matches no file; give a file, folder or glob"
    line = f"has {counted(len(names), 'file')}, such as {names[0]}, but none matches {wanted}"
    for ending, choice in CHOICES.items():
        if names[0].lower().endswith(ending):
            return f"{line}; set data={choice}, which reads *{ending}"
    return f"{line}; give another folder, or a glob that names the files"


def _listed(system: Any, place: str, is_folder: bool, is_here: bool) -> list[dict[str, Any]]:
    """Return what a file system knows of each file in a folder, or that a path or glob matches."""
    if is_folder and is_here:
        return LocalFiles(system).in_folder(place)
    exists = is_folder or system.exists(place)
    if is_here and not exists:
        return LocalFiles(system).of_glob(place)
    if exists:
        listed = system.find(place, detail=True)
    else:
        listed = system.glob(place, detail=True)
    return [_complete_info(system, name, info) for name, info in listed.items()]


def _complete_info(system: Any, name: str, info: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a file; a list of HTTP has no sizes."""
    if info.get("size") is None and info.get("type") != "directory":
        known: dict[str, Any] = system.info(name)
        return known
    return info


def _raise_cause(system: Any, place: str, is_here: bool) -> None:
    """Raise the server's error, if it has one: `exists` says no, whatever it is."""
    if is_here or re.search(r"[*?\[]", place):
        return
    try:
        system.info(place)
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from error


def _open_remote(system: Any, path: str, _: str) -> Any:
    return open_remote(system, path)


def _no_file(path: str) -> UserError:
    """Return the error for what is in a corpus and can't be read: a FIFO may never end."""
    return UserError(
        f"{path} of the corpus is not a file, but a FIFO, a socket, or a device; remove it, or "
        "name the files alone with a glob"
    )


def find_splits(
    path: str, val_path: str | None, test_path: str | None, wanted: str = ""
) -> list[Files]:
    """Return the files of `path`, then those to validate and to test on, if there are any."""
    groups = [find_files(path, wanted)]
    if val_path is not None:
        groups.append(find_files(val_path, wanted, "data.source.val_path", "val"))
    if test_path is not None:
        groups.append(find_files(test_path, wanted, "data.source.test_path", "test"))
    return groups


def identity_of(groups: list[Files]) -> Any:
    """Return the identity of files; of those that are divided, without a list around it."""
    if len(groups) == 1:
        return groups[0].identity()
    return [[group.split, group.identity()] for group in groups]


def read_content(raw: Any, path: str, skip: int, size: int) -> Iterator[bytes]:
    """Yield a file's content, decompressed, without the first `skip` bytes, `size` at a time."""
    if path.endswith(".zst"):
        chunks = _decompressed(raw)
    elif path.endswith(".gz"):
        chunks = iter(partial(gzip.GzipFile(fileobj=raw).read, size), b"")
    else:
        raw.seek(skip)
        skip = 0
        chunks = iter(partial(raw.read, size), b"")
    for data in chunks:
        yield data[skip:]
        skip = max(0, skip - len(data))


def _decompressed(raw: Any) -> Iterator[bytes]:
    """Decompress all frames; zstandard's own reader accepts a truncated file."""
    zstandard = import_optional("a .zst file", "zstandard", "zstd")
    frame = None
    data = raw.read(BLOCK)
    while data:
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        yield frame.decompress(data)
        data = frame.unused_data or raw.read(BLOCK)
    if frame and not frame.eof:
        raise EOFError("it is truncated")
