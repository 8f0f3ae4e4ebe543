"""Documents in files: whole files, parts of long ones, or lines; how they are held out."""

from __future__ import annotations

import gzip
import shlex
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.optional import import_optional
from lockstep.settings import setting
from lockstep.tokens.sources.files import PACKED, File, Files, find_splits, identity_of
from lockstep.tokens.sources.source import (
    BLOCK,
    DOCUMENTS,
    Block,
    Documents,
    Position,
    reading,
    refuse_binary,
    split_of_name,
    splits_of_texts,
    to_utf8,
)
from lockstep.tokens.tokenizer import find_cut

LONGEST = 1 << 22  # bytes per document at most; a longer file is cut
FEW = 10  # if fewer held-out files are expected, a part of every file is held out instead
ENDS = "the end of each file"  # that part; in a file over `LONGEST`, of each piece


@dataclass
class FileDocuments(Documents):
    """Documents in files; the classes below say in which files, and what one document is."""

    @property
    def by_line(self) -> bool:
        """Whether a file has a document per line."""
        return False

    @property
    @abstractmethod
    def file_groups(self) -> list[Files]:
        """The files to read, by split."""

    @cached_property
    def files(self) -> list[File]:
        """All files, in the order in which they are read."""
        return [file for group in self.file_groups for file in group.files]

    @cached_property
    def before(self) -> list[int]:
        """The bytes of all files before each."""
        return [*accumulate((file.size for file in self.files), initial=0)]

    @property
    def size(self) -> int | None:
        """The bytes of all files."""
        return self.before[-1]

    @cached_property
    def divided(self) -> int:
        """How many files are divided: those that don't have a split of their own."""
        return sum(file.split is None for file in self.files)

    @property
    def by_name(self) -> bool:
        """Whether whole files are held out; with few files, their names may hold out none."""
        shares = [share for share in self.fractions if share]
        return not shares or self.divided * min(shares) >= FEW

    @property
    def held_out(self) -> str:
        """What the validation split consists of, in words."""
        if self.by_line or self.by_name or not self.fractions[0]:
            return DOCUMENTS
        return ENDS

    @property
    def fractions(self) -> tuple[float, float]:
        """The fractions of divided files for validation and for tests."""
        return self.val_fraction, self.test_fraction

    def identity(self) -> Any:
        """Return the identity of the files."""
        return identity_of(self.file_groups, self.root)

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the documents, file by file; small ones come together."""
        texts: list[bytes] = []
        splits: list[str] = []
        after = start
        size = 0
        invalid = 0
        for number in range(start.part, len(self.files)):
            file = self.files[number]
            begin = start.offset_in(number)
            pieces = self._pieces(number, start)
            for piece, after in pieces:
                if b"\0" in piece and not begin and self.group_of(number).leaves_out(file, piece):
                    after = Position(number + 1, 0, self.before[number + 1])
                    pieces.close()
                    break
                refuse_binary(piece, file.path)
                if self.invalid_utf8 == "fail":
                    refuse_other_encoding(piece, begin, file.path)
                begin = after.offset
                documents, faults = self.documents_in(piece, file.path)
                divided, names = self._divided(documents, file)
                texts += divided
                splits += names
                size += len(piece)
                invalid += faults
                if size >= BLOCK:
                    yield Block(after, texts, splits, invalid)
                    texts = []
                    splits = []
                    size = 0
                    invalid = 0
        yield Block(after, texts, splits, invalid)
        for group in self.file_groups:
            group.tell_of_left_out()

    def documents_in(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        """Return the documents in a piece of a file, and how many weren't UTF-8."""
        return to_utf8([piece], self.invalid_utf8, path)

    def splits_of(self, texts: Sequence[bytes]) -> list[str]:
        """Return the split of each document, by its text."""
        return splits_of_texts(texts, *self.fractions)

    def _divided(self, texts: list[bytes], file: File) -> tuple[list[bytes], list[str]]:
        """Return documents, or parts of them, and the split of each."""
        if file.split is not None:
            return texts, [file.split] * len(texts)
        if self.by_line:
            return texts, self.splits_of(texts)
        if self.by_name:
            return texts, [split_of_name(file.name, *self.fractions)] * len(texts)
        parts = [part for text in texts for part in self._with_end_apart(text, file.name)]
        return [text for _, text in parts], [split for split, _ in parts]

    def _with_end_apart(self, text: bytes, name: str) -> list[tuple[str, bytes]]:
        """Return a document without its end, and the end, which is held out."""
        val_fraction, test_fraction = self.fractions
        if not text:
            return [(split_of_name(name, val_fraction, test_fraction), text)]
        train = find_cut(text[: int(len(text) * (1 - val_fraction - test_fraction))])
        parts = [("train", text[:train])]
        end = len(text)
        if test_fraction:
            end = max(train, find_cut(text[: int(len(text) * (1 - test_fraction))]))
            parts.append(("test", text[end:]))
        if val_fraction:
            parts.append(("val", text[train:end]))
        return parts

    def _pieces(
        self, number: int, start: Position
    ) -> Generator[tuple[bytes, Position], None, None]:
        """Yield a file in pieces, cut where a text may be cut, from `start` if that is in it."""
        file = self.files[number]
        before = self.before[number]
        offset = start.offset_in(number)
        longest = BLOCK if self.by_line else LONGEST
        rest = b""
        with reading(file.path), self.group_of(number).open(file.path, "rb") as raw:
            for data in read_content(raw, file.path, offset, longest):
                rest += data
                while len(rest) > longest:
                    end = self._end(rest, longest)
                    if not end:  # read on, until there is a place to cut
                        break
                    offset += end
                    yield rest[:end], Position(number, offset, before + raw.tell())
                    rest = rest[end:]
        yield rest, Position(number + 1, 0, self.before[number + 1])

    def open(self, number: int) -> Callable[..., Any]:
        """Return what opens the file of this number: those of a server aren't on this machine."""
        return self.group_of(number).open

    def group_of(self, number: int) -> Files:
        """Return the files with the one of this number."""
        for group in self.file_groups:
            if number < len(group.files):
                return group
            number -= len(group.files)
        raise IndexError(number)

    def _end(self, text: bytes, longest: int) -> int:
        """Return where a text may be cut, however much was read; 0: nowhere yet."""
        if self.by_line:
            return text.rfind(b"\n", 0, longest) + 1 or text.find(b"\n", longest) + 1
        return find_cut(text[:longest])


def refuse_other_encoding(piece: bytes, begin: int, path: str) -> None:
    """Raise a `UserError` if a piece of a file, which begins at byte `begin`, isn't UTF-8."""
    try:
        piece.decode()
    except UnicodeDecodeError as error:
        remedy = "convert it to UTF-8"
        if not path.endswith(PACKED):
            name = shlex.quote(path)
            convert = f"iconv -f latin1 -t utf-8 {name} > {name}.tmp && mv {name}.tmp {name}"
            remedy += f", for example from Latin-1: {convert}"
        raise UserError(
            f"{path} of the corpus is not UTF-8: byte {begin + error.start:,} is "
            f"0x{piece[error.start]:02X}; {remedy}; or set data.source.invalid_utf8 to replace or "
            "skip"
        ) from None


@dataclass
class PathDocuments(FileDocuments):
    """Documents in the files that the user names."""

    wanted: ClassVar[str] = ""  # pattern that the names of a folder's files must match
    leaves_out: ClassVar[bool] = False  # files that are no texts

    path: str = setting(
        "a file, a folder, a glob, or a URL; .gz and .zst are unpacked", "", decides="place"
    )
    val_path: str | None = setting(
        "files to validate on; null: val_fraction of `path`", None, decides="place"
    )
    test_path: str | None = setting(
        "files to test on; null: test_fraction of `path`", None, decides="place"
    )

    @cached_property
    def file_groups(self) -> list[Files]:
        """The files of `path`, of `val_path`, and of `test_path`."""
        paths = (self.path, self.val_path, self.test_path)
        return find_splits(*paths, self.wanted, texts=self.leaves_out)

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return self.test_path is not None or super().has_test

    @property
    def fractions(self) -> tuple[float, float]:
        """The fractions of `path` for validation and for tests."""
        val = self.val_fraction if self.val_path is None else 0.0
        test = self.test_fraction if self.test_path is None else 0.0
        return val, test


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
