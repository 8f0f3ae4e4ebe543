"""Where training data comes from: each corpus names itself and yields its data block by block.

No corpus is ever held in memory as a whole.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from lockstep_gpt import config as schema
from lockstep_gpt.config import DataConfig, UserError
from lockstep_gpt.data.tokenizer import Tokens, cut, library, token_dtype
from lockstep_gpt.registry import additions, resolved

# Installed packages are not the library; tests are long, repetitive and at times not valid code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SYNTHETIC_SEED = 20_231  # fixed: `seed` shall decide the order of samples, not the samples
BLOCK = 1 << 20  # bytes of small documents that are handled together
LONGEST = 1 << 22  # bytes of a file that are one document at most
FEW = 10  # held-out files to expect, below which a part of every file is held out instead


class Position(NamedTuple):
    """Where a corpus goes on."""

    part: int = 0  # the file, in the corpus's order
    offset: int = 0  # bytes, rows or tokens of it that lie before
    read: int = 0  # bytes of the corpus that lie before, as its `size` counts them


class Block(NamedTuple):
    """A stretch of a corpus."""

    after: Position
    texts: list[bytes]  # the documents, valid UTF-8
    val: list[bool]  # which of them are held out
    invalid: int = 0  # how many were not UTF-8


class TokenBlock(NamedTuple):
    """A stretch of one split of a corpus that is no text."""

    after: Position
    split: str
    ids: Tokens


class Corpus(Protocol):
    """What `prepare` asks of a corpus."""

    @property
    def size(self) -> int | None:
        """Bytes to read in all; None where nobody knows before the end."""

    def identity(self) -> Any:
        """Return plain values that change with anything in the corpus that decides the tokens."""

    def blocks(self, start: Position) -> Iterator[Block] | Iterator[TokenBlock]:
        """Yield all from `start` on, cut alike each time, so that a killed build can go on.

        Raises:
            UserError: something cannot be read.
        """


def split_of(name: str, val_fraction: float) -> str:
    """Return the split of a document, from its name alone: the same on every machine.

    A document never moves when others come or go. The share holds for documents, in the mean.
    """
    first = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8])
    return "val" if first < val_fraction * 2**64 else "train"


def held_out(texts: list[bytes], val_fraction: float) -> list[bool]:
    """Return which documents without names are held out, from their text alone.

    So equal documents are never in both splits. The factor is Knuth's multiplicative hash: the
    sums of similar lines are similar.
    """
    sums = np.fromiter(map(zlib.crc32, texts), np.uint32, len(texts))
    held: list[bool] = (sums * np.uint32(2_654_435_761) < val_fraction * 2**32).tolist()
    return held


def progress(doing: str, total: int | None, done: int = 0) -> tqdm[Any]:
    """Return a progress bar of bytes, which only a terminal shows."""
    return tqdm(desc=doing, total=total, initial=done, unit="B", unit_scale=True, disable=None)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Say in one line what is wrong with a file: systems and formats raise what they like."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        line = " ".join(reason.split())
        raise UserError(
            f"{path} cannot be read: {line}; mend it, or take another corpus"
        ) from error


class File(NamedTuple):
    """One file of a corpus."""

    name: str  # below what the user gave, so the same wherever the corpus lies
    size: int
    stamp: Any  # changes with the content, as far as the file system tells
    path: str


class Files:
    """The files of a folder, a glob or a URL, by name.

    Raises:
        UserError: there are none, or the file system cannot be read.
    """

    wanted: ClassVar[str] = ""  # what the names of a folder's files must match

    def __init__(self, path: str) -> None:
        self.path = path
        self.open: Callable[..., Any] = open
        self.files = sorted(self.find(), key=lambda file: file.name)
        self.before = list(accumulate((file.size for file in self.files), initial=0))
        self.size: int | None = self.before[-1]

    def find(self) -> list[File]:
        """Look for the files, in no order."""
        import fsspec  # half of this module's time to import, and not always needed

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
            raise UserError(f"data.path={self.path} leads to no file; give a file, folder or glob")
        return files

    def identity(self) -> Any:
        """Return the names and sizes, and the times of change or what else a server knows."""
        return [file[:3] for file in self.files]


class TextFiles(Files):
    """Files of text, plain or packed (.gz, .zst), a document per file or per line."""

    def __init__(
        self, config: schema.DocumentsData, path: str, by_line: bool = False, by_name: bool = False
    ) -> None:
        super().__init__(path)
        self.val_fraction, self.invalid_utf8 = config.val_fraction, config.invalid_utf8
        self.by_line = by_line
        # Names of a few files may hold out none: then each file's end is held out.
        self.by_name = by_name or len(self.files) * config.val_fraction >= FEW

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the documents, file by file; many small ones together."""
        texts: list[bytes] = []
        val: list[bool] = []
        after, size, invalid = start, 0, 0
        for number in range(start.part, len(self.files)):
            for piece, after in self._pieces(number, start):
                documents, faults = self._documents(piece, self.files[number].path)
                documents, held = self._split(documents, self.files[number].name)
                texts, val = texts + documents, val + held
                size, invalid = size + len(piece), invalid + faults
                if size >= BLOCK:
                    yield Block(after, texts, val, invalid)
                    texts, val, size, invalid = [], [], 0, 0
        yield Block(after, texts, val, invalid)

    def _split(self, texts: list[bytes], name: str) -> tuple[list[bytes], list[bool]]:
        if self.by_line:
            return texts, held_out(texts, self.val_fraction)
        if self.by_name or not any(texts):
            return texts, [split_of(name, self.val_fraction) == "val"] * len(texts)
        end = cut(texts[0][: int(len(texts[0]) * (1 - self.val_fraction))])
        return [texts[0][:end], texts[0][end:]], [False, True]

    def _documents(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        """Return the documents in a piece of a file, and how many were not UTF-8."""
        if not self.by_line:
            return valid([piece], self.invalid_utf8, path)
        text = piece.replace(b"\r\n", b"\n") if b"\r" in piece else piece
        lines = list(filter(None, text.split(b"\n")))
        return (lines, 0) if is_utf8(piece) else valid(lines, self.invalid_utf8, path)

    def _pieces(self, number: int, start: Position) -> Iterator[tuple[bytes, Position]]:
        """Yield a file cut where a text may be cut, from `start` on if that lies in it."""
        file, before = self.files[number], self.before[number]
        offset = start.offset if start.part == number else 0
        longest = BLOCK if self.by_line else LONGEST
        rest = b""
        with reading(file.path), self.open(file.path, "rb") as raw:
            for data in _content(raw, file.path, offset, longest):
                rest += data
                while len(rest) > longest and (end := self._end(rest, longest)):
                    offset += end
                    yield rest[:end], Position(number, offset, before + raw.tell())
                    rest = rest[end:]
        yield rest, Position(number + 1, 0, self.before[number + 1])

    def _end(self, text: bytes, longest: int) -> int:
        """Return where a text may be cut, whatever it was read with; 0: nowhere yet."""
        if self.by_line:
            return text.rfind(b"\n", 0, longest) + 1 or text.find(b"\n", longest) + 1
        return cut(text[:longest])


def _content(raw: Any, path: str, skip: int, size: int) -> Iterator[bytes]:
    """Yield what a file holds, unpacked and without the first bytes, so many bytes at a time."""
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
    """Yield all frames; zstandard's own reader takes half a file for a whole one."""
    zstandard = library("zstandard", "zstd")
    frame, data = None, raw.read(BLOCK)
    while data:
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        yield frame.decompress(data)
        data = frame.unused_data or raw.read(BLOCK)
    if frame and not frame.eof:
        raise EOFError("it ends in the middle")


def is_utf8(text: bytes) -> bool:
    """Tell whether `text` is valid UTF-8."""
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def valid(texts: list[bytes], policy: str, path: str) -> tuple[list[bytes], int]:
    """Return `texts` as UTF-8, by `data.invalid_utf8`, and how many were not.

    Raises:
        UserError: one is not, and the policy is to fail.
    """
    good = [text for text in texts if is_utf8(text)]
    invalid = len(texts) - len(good)
    if invalid and policy == "fail":
        raise UserError(
            f"{path} of the corpus is not UTF-8; mend it, or set data.invalid_utf8 to replace or "
            "skip"
        )
    if invalid and policy == "replace":
        return [text.decode("utf-8", "replace").encode() for text in texts], invalid
    return good, invalid


class JsonLines(TextFiles):
    """Files with a JSON object per line, one field of which is a document."""

    wanted = r"\.(jsonl|ndjson|json)(\.\w+)?$"

    def __init__(self, config: schema.JsonlData) -> None:
        super().__init__(config, config.path, by_line=True)
        self.field = config.field

    def _documents(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        lines, invalid = super()._documents(piece, path)
        return [text for line in lines if (text := self._text(line, path))], invalid

    def _text(self, line: bytes, path: str) -> bytes:
        try:
            text: str = json.loads(line.decode())[self.field] or ""
            return text.encode("utf-8", "replace")  # JSON can spell half a surrogate pair
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(
                f"{path} of the corpus has the line {line[:60]!r}, no JSON object with text under "
                f"data.field={self.field}; name another field or mend the line"
            ) from None


class StandardLibrary(TextFiles):
    """Every `.py` file of the Python standard library at hand."""

    def __init__(self, config: schema.StdlibData, root: Path | None = None) -> None:
        super().__init__(config, str(root or sysconfig.get_path("stdlib")), by_name=True)

    def identity(self) -> Any:
        """Return names and sizes: a new layer of a container changes every time and no byte."""
        return [sys.version.split()[0], *(file[:2] for file in self.files)]

    def find(self) -> list[File]:
        """Look for the files, in no order."""
        found = list(_python_files(self.path))
        if not found:
            raise UserError(
                f"data.source=stdlib finds no .py file under {self.path}; use a Python that has "
                "its library as files, or data=synthetic"
            )
        return found


def _python_files(folder: str, prefix: str = "") -> Iterator[File]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in LEFT_OUT:
                    yield from _python_files(entry.path, f"{name}/")
            elif entry.name.endswith(".py") and entry.is_file():
                yield File(name, entry.stat().st_size, entry.stat().st_mtime, entry.path)


class RandomTokens:
    """Uniformly random token ids, the same for the same size on every machine."""

    def __init__(self, config: schema.SyntheticData) -> None:
        self.vocab_size, self.tokens = config.vocab_size, config.tokens
        self.train = self.tokens - round(self.tokens * config.val_fraction)
        self.dtype = token_dtype(self.vocab_size)
        self.size: int | None = self.tokens * self.dtype.itemsize

    def identity(self) -> Any:
        """Return what decides the tokens beside the settings."""
        return SYNTHETIC_SEED

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield first all of train, then all of val.

        Raw draws of Philox are scaled here, by the high half of `draw * vocab_size`, because
        NumPy promises stable raw draws but not a stable `integers()`. The bias is < 2**-16.
        """
        philox, done = np.random.Philox(SYNTHETIC_SEED), start.offset
        philox.random_raw(done, output=False)
        while done < self.tokens:
            split, end = ("train", self.train) if done < self.train else ("val", self.tokens)
            draws = philox.random_raw(min(BLOCK >> 2, end - done)) >> np.uint64(32)
            ids = (draws * np.uint64(self.vocab_size)) >> np.uint64(32)
            done += ids.size
            after = Position(0, done, done * self.dtype.itemsize)
            yield TokenBlock(after, split, ids.astype(self.dtype))


CORPORA: dict[str, Callable[[Any], Corpus]] = {
    "stdlib": StandardLibrary,
    "text": lambda config: TextFiles(config, config.path, config.documents == "line"),
    "jsonl": JsonLines,
    "synthetic": RandomTokens,
}


def corpus_of(config: DataConfig) -> Corpus:
    """Open the corpus that `data.source` names, one of an extra too."""
    if config.source in CORPORA:
        return CORPORA[config.source](config)
    added = {name: each[1] for sources in additions("SOURCES") for name, each in sources.items()}
    corpus: Corpus = resolved(added[config.source])(config)
    return corpus
