"""The files of a folder, a glob, or a URL: those of this machine, and those of a server.

On this machine, links are followed, and no folder is skipped silently. On a server, reading goes on
after a lost connection.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.optional import library_command
from lockstep.settings import counted
from lockstep.tokens.sources.content import sums_of
from lockstep.tokens.sources.source import is_utf8, reading

logger = logging.getLogger(__name__)

# Ending of a file's name -> the choice of `data` for it.
CHOICES = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "shards",
}
# Endings of files that are no texts, unless they are: a folder's fingerprint is without them.
NO_TEXTS = re.compile(
    r"\.(png|jpe?g|gif|bmp|ico|webp|tiff?|heic|avif|psd|mp3|wav|flac|ogg|m4a|mp4|mkv|avi|mov|webm|wmv"
    r"|zip|tar|tgz|7z|rar|xz|bz2|jar|whl|pdf|docx|xlsx|pptx|odt|ods|odp|epub|mobi"
    r"|pyc|pyo|so|dll|dylib|exe|class|wasm|ttf|otf|woff2?|eot"
    r"|npy|npz|pt|pth|pkl|parquet|arrow|feather|h5|hdf5|safetensors|onnx|sqlite3?)"
)
# Endings of texts: one that has NUL bytes is in another encoding, or damaged, and isn't left out.
TEXTS = re.compile(
    r"\.(txt|text|md|markdown|rst|tex|html?|xml|json|jsonl|ndjson|csv|tsv|ya?ml|toml|ini|cfg|log|srt"
    r"|py|ipynb|c|h|cc|cpp|hpp|js|ts|java|go|rs|sh|sql|css)"
)
PACKED = (".gz", ".zst")  # files whose bytes are not those of the text
START = 1 << 13  # bytes of a file that tell whether it is a text
SHOWN = 3  # names of files that are left out
EVERYTHING = ("**",)  # the parts of a glob, between slashes
TRIES = 5  # in a row, before an error of the server ends the reading
WAIT = 0.5  # seconds before the second try; they double with each
BUFFER = 1 << 20  # bytes
# Another try would give the same.
FINAL = (FileNotFoundError, PermissionError, NotImplementedError)


class File(NamedTuple):
    """One file of a corpus."""

    name: str  # relative to the path that the user gave, so the corpus can move
    size: int
    path: str
    split: str | None = None  # None: its documents are divided
    stamp: Any = None  # of a server's file: changes with the content, as far as it reports it


@dataclass(frozen=True)
class Place:
    """What the user has named: a folder, a glob, a file, or a URL of one of these."""

    setting: str
    path: str
    is_folder: bool

    def names(self, name: str) -> bool:
        """Return whether a file was chosen by its ending, or by its whole name."""
        last = self.path.rpartition("/")[2].lower()
        if self.is_folder or re.search(r"[*?\[]", self.path) is None:
            return not self.is_folder
        ending = ending_of(name)
        return last == name.lower().rpartition("/")[2] or (
            ending != "" and ending_of(last) == ending
        )

    def glob_of(self, ending: str) -> str:
        """Return the setting that chooses the files with this ending here, as it is typed."""
        last = self.path.rpartition("/")[2]
        if self.is_folder or last == "**":
            start = self.path.removesuffix("**").rstrip("/") + "/**/"
        else:
            start = self.path.removesuffix(last)
        return f"{self.setting}={shlex.quote(f'{start}*{ending}')}"


@dataclass
class Files:
    """Files of one split, sorted by name, or files whose documents are divided."""

    files: list[File]
    open: Callable[..., Any] = open  # files of a server aren't on this machine
    split: str | None = None  # None: divided
    place: Place | None = None  # where they were found
    left_out: dict[str, None] = field(default_factory=dict)  # names of those that are no texts

    def identity(self, root: str) -> Any:
        """Return names and SHA-256; of a server's files names, sizes, and what else it reports.

        Args:
            root: the folder of prepared tokens, in which sums are remembered.
        """
        if self.open is not open:
            return [[file.name, file.size, file.stamp] for file in self.files]
        sums = sums_of([file.path for file in self.files], root)
        return [[file.name, digest] for file, digest in zip(self.files, sums, strict=True)]

    def leaves_out(self, file: File, piece: bytes) -> bool:
        """Return whether a file that begins with a piece with NUL bytes is left out.

        One that the user has named, or that is a text by its name or in another encoding, isn't.
        """
        is_chosen = self.place is None or self.place.names(file.name)
        if is_chosen or TEXTS.fullmatch(ending_of(file.name)) or has_wide_units(piece):
            return False
        self.left_out[file.name] = None
        return True

    def tell_of_left_out(self) -> None:
        """Say once which files are left out; raise a `UserError` if that is all of them."""
        if not self.left_out or self.place is None:
            return
        names = [*self.left_out]
        shown = f"{', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        count = counted(len(names), "file")
        place = f"{self.place.setting}={self.place.path}"
        read = [file.name for file in self.files if file.name not in self.left_out]
        if not read:
            raise UserError(f"{place} has {count}, but no text: {shown}; {self._remedy(names)}")
        verb = "is not text, and is" if len(names) == 1 else "are not text, and are"
        glob = self.place.glob_of(_ending(read) or ".txt")
        _warn(f"{place}: {count} {verb} left out: {shown}; to choose files, give a glob, as {glob}")

    def _remedy(self, names: list[str]) -> str:
        """Return what to do if all files are left out."""
        assert self.place is not None, "files are left out only where they were found"
        ending = _ending(names)
        if ending in CHOICES:
            return f"set data={CHOICES[ending]}, which reads *{ending}"
        if not NO_TEXTS.fullmatch(ending):
            return "give a folder with texts"
        glob = self.place.glob_of(ending)
        return f"give a folder with texts, or, if these are texts, name them: {glob}"


def ending_of(name: str) -> str:
    """Return the ending of a file's name in lower case, such as `.txt`, also if it is packed."""
    name = name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return Path(name).suffix


def _ending(names: Sequence[str]) -> str:
    """Return the most frequent ending of files; "" if none has one."""
    endings = Counter(ending for ending in map(ending_of, names) if ending)
    return endings.most_common(1)[0][0] if endings else ""


def _has_text(path: str) -> bool:
    """Return whether a file of this machine begins with text, whatever its name says."""
    with reading(path), Path(path).open("rb") as file:
        start = file.read(START)
    if b"\0" in start or start.startswith(b"%PDF-"):
        return False
    return is_utf8(start) or (len(start) == START and any(is_utf8(start[:-n]) for n in (1, 2, 3)))


@cache  # once, although a tokenizer that learns reads the corpus, too
def _warn(line: str) -> None:
    logger.warning("%s", line)


def has_wide_units(piece: bytes) -> bool:
    """Return whether bytes are a text in UTF-16 or UTF-32."""
    start = piece[: 1 << 12]
    start = start[: len(start) // 4 * 4]
    for encoding in ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"):
        for end in (len(start), len(start) - 2):  # half a pair of surrogates may be the last
            with contextlib.suppress(UnicodeDecodeError):
                text = start[:end].decode(encoding).removeprefix("\ufeff")
                known = sum(letter.isprintable() or letter.isspace() for letter in text)
                if text and known >= 0.95 * len(text):
                    return True
    return False


def find_files(
    path: str,
    wanted: str = "",
    setting: str = "data.source.path",
    split: str | None = None,
    *,
    texts: bool = False,
) -> Files:
    """Return the files of a folder, a glob, or a URL.

    Args:
        path: the folder, glob, file, or URL.
        wanted: pattern that the names of a folder's files must match.
        setting: the setting that the path is from.
        split: the split of all the files; None: their documents are divided.
        texts: whether files that are no texts are left out, unless the path names them.

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
    where = Place(setting, path, is_folder)
    left_out: dict[str, None] = {}
    for info in infos:
        name = info["name"].removeprefix(base).lstrip("/")
        if not pattern.match(name):
            continue
        if info["type"] == "other" and is_here:
            raise _no_file(info["name"])
        is_other = texts and NO_TEXTS.fullmatch(ending_of(name)) and not where.names(name)
        if info["type"] == "file" and is_other and not (is_here and _has_text(info["name"])):
            left_out[name] = None
            continue
        if info["type"] == "file":
            stamp = None if is_here else info.get("mtime") or sorted(map(str, info.items()))
            files.append(File(name, info["size"] or 0, info["name"], split, stamp))
    opener = open if is_here else partial(_open_in, system)
    found = Files(files, opener, split, where, dict.fromkeys(sorted(left_out)))
    if not files:
        found.tell_of_left_out()
        with reading(f"{setting}={path}"):
            _raise_cause(system, place, is_here)
        raise UserError(f"{setting}={path} {_what_instead(infos, wanted)}")
    files.sort(key=lambda file: file.name)
    return found


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


def _open_in(system: Any, path: str, _: str) -> Any:
    return open_remote(system, path)


def _no_file(path: str) -> UserError:
    """Return the error for what is in a corpus and can't be read: a FIFO may never end."""
    return UserError(
        f"{path} of the corpus is not a file, but a FIFO, a socket, or a device; remove it, or "
        "name the files alone with a glob"
    )


def find_splits(
    path: str,
    val_path: str | None,
    test_path: str | None,
    wanted: str = "",
    *,
    texts: bool = False,
) -> list[Files]:
    """Return the files of `path`, then those to validate and to test on, if there are any."""
    groups = [find_files(path, wanted, texts=texts)]
    if val_path is not None:
        setting = "data.source.val_path"
        groups.append(find_files(val_path, wanted, setting, "val", texts=texts))
    if test_path is not None:
        setting = "data.source.test_path"
        groups.append(find_files(test_path, wanted, setting, "test", texts=texts))
    return groups


def identity_of(groups: list[Files], root: str) -> Any:
    """Return the identity of files; of those that are divided, without a list around it."""
    if len(groups) == 1:
        return groups[0].identity(root)
    return [[group.split, group.identity(root)] for group in groups]


class LocalFiles:
    """Lists files as fsspec describes them; also other things than folders, such as FIFOs.

    Its methods raise an `OSError` if a folder can't be read, and a `UserError` if a link leads
    nowhere, or to a folder that the link is in.

    Args:
        system: fsspec's local file system, which skips links, and folders that it can't read.
    """

    def __init__(self, system: Any) -> None:
        self.system = system

    def in_folder(self, folder: str) -> list[dict[str, Any]]:
        """Return the files in a folder and its subfolders, except hidden ones."""
        return [*self._entries(folder, EVERYTHING, (os.path.realpath(folder),), hidden=False)]

    def of_glob(self, pattern: str) -> list[dict[str, Any]]:
        """Return the files that a glob matches, hidden ones too."""
        from fsspec.utils import glob_translate  # slow to import, and not always needed

        folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0] or "/"
        if not Path(folder).is_dir():
            return []
        parts = pattern.removeprefix(folder).lstrip("/").split("/")
        entries = self._entries(folder, parts, (os.path.realpath(folder),), hidden=True)
        is_match = re.compile(glob_translate(pattern)).match
        return [entry for entry in entries if is_match(entry["name"])]

    def _entries(
        self, folder: str, parts: Sequence[str], above: Sequence[str], hidden: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield what is in a folder and its subfolders, if a glob may match it.

        Args:
            folder: its path.
            parts: the rest of the glob, from this folder on; `**` matches the rest of any path.
            above: real paths of the first folder, and of those that links have led to.
            hidden: whether to include what is hidden.
        """
        with os.scandir(folder) as listed:
            entries = [*listed]
        rest = parts if parts[0] == "**" else parts[1:]
        for entry in entries:
            is_hidden = entry.name.startswith(".")
            if not _may_match(entry.name, parts[0]) or (is_hidden and not hidden):
                continue
            info = self._followed(entry)
            if info["type"] != "directory":
                yield info
            elif rest:  # without a rest, the glob matches the folder, not what is in it
                links = above
                if entry.is_symlink():
                    links = (*above, _real_path(entry.path, above))
                yield from self._entries(entry.path, rest, links, hidden)

    def _followed(self, entry: os.DirEntry[str]) -> dict[str, Any]:
        """Return the description of a file or a folder, or of what a link leads to."""
        info: dict[str, Any]
        if not entry.is_symlink():
            info = self.system.info(entry)
            return info
        try:
            info = self.system.info(entry.path)
        except OSError as error:
            raise UserError(
                f"{entry.path} of the corpus is a link to {Path(entry.path).readlink()}, which "
                f"cannot be read ({error.strerror}); restore what it leads to, or remove it"
            ) from error
        return info


def _may_match(name: str, part: str) -> bool:
    """Return whether a name may match a part of a glob; of `[...]`, fsspec knows more forms."""
    return "[" in part or fnmatchcase(name, part)


def _real_path(link: str, above: Sequence[str]) -> str:
    """Return the folder that a link leads to; raise a `UserError` if the link is in that folder."""
    target = os.path.realpath(link)
    if target in above:
        raise UserError(
            f"{link} of the corpus is a link to {target}, which contains it, so it has no end; "
            "remove it"
        )
    return target


def find_file_system(url: str, setting: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL or a path, and the place in it.

    Raises:
        UserError: the library for this protocol is missing.
        Exception: any other error of a file system.
    """
    import fsspec  # a large part of the import time, and not always needed

    try:
        system, place = fsspec.url_to_fs(url)  # expands ~ too
    except ImportError as error:
        cause = error.__cause__ or error
        library = (getattr(cause, "name", None) or str(error)).partition(".")[0]
        raise UserError(
            f"{setting}={url} needs {library}, which is not installed; run: "
            f"{library_command(library)}"
        ) from error
    return system, place


def open_remote(system: Any, path: str) -> io.BufferedReader:
    """Open a file of a server for reading; `read` returns fewer bytes only at its end."""
    return io.BufferedReader(RemoteFile(system, path), BUFFER)


class RemoteFile(io.RawIOBase):
    """Opens a file again, where it was, after an error or an early end.

    A server that doesn't send parts of files sends the file from its start again.

    Args:
        system: the file system of fsspec.
        path: the file in it.
    """

    def __init__(self, system: Any, path: str) -> None:
        self.system = system
        self.path = path
        self.sends_parts = True
        self.failures = 0  # in a row; of a server that doesn't send parts, in all
        self.offset = 0
        self.raw: Any = None
        self.size: int | None = system.info(path).get("size")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self.offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set and return the offset of the next byte; a read goes there.

        Raises:
            OSError: it is counted from the end, which the server doesn't tell.
        """
        start = 0
        if whence == io.SEEK_CUR:
            start = self.offset
        if whence == io.SEEK_END:
            if self.size is None:
                raise OSError("the server does not tell its size")
            start = self.size
        if start + offset != self.offset:
            self.offset = start + offset
            self._close_raw()
        return self.offset

    def readinto(self, buffer: Any) -> int:
        """Read bytes into `buffer`, and return how many; 0 at the end.

        Raises:
            Exception: any error of the file system, several times in a row.
        """
        view = memoryview(buffer)
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        self._close_raw()
        super().close()

    def _read(self, size: int) -> bytes:
        while self.size is None or self.offset < self.size:
            try:
                if self.raw is None:
                    self._open()
                data: bytes = self.raw.read(size)
                if not data and self.size is not None:
                    raise EOFError(f"it ended at byte {self.offset:,} of {self.size:,}")
            except Exception as error:  # of any library
                self._close_raw()
                self._note_failure(error)
            else:
                self.offset += len(data)
                if self.sends_parts:
                    self.failures = 0
                return data
        return b""

    def _open(self) -> None:
        """Open the file, and go to the offset."""
        if self.sends_parts:
            self.raw = self.system.open(self.path, "rb")
            self.raw.seek(self.offset)
            return
        self.raw = self.system.open(self.path, "rb", block_size=0)  # a stream
        skipped = 0
        while skipped < self.offset:
            data = self.raw.read(min(BUFFER, self.offset - skipped))
            if not data:
                raise EOFError(f"it ended at byte {skipped:,}")
            skipped += len(data)

    def _note_failure(self, error: Exception) -> None:
        """Wait before another try; raise the error if that is of no use."""
        if isinstance(error, ValueError) and self.sends_parts:  # what fsspec's HTTP raises
            self.sends_parts = False
            return
        self.failures += 1
        if self.failures == TRIES or isinstance(error, FINAL):
            raise error
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("%s: %s; trying again at byte %s", self.path, reason, f"{self.offset:,}")
        time.sleep(WAIT * 2 ** (self.failures - 1))

    def _close_raw(self) -> None:
        if self.raw is not None:
            self.raw.close()
            self.raw = None
