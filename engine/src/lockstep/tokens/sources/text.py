"""Text in files: `data=text`, `data=jsonl`, and `data=stdlib`.

A text file is a document, or each of its lines is one. A file of JSON lines has an object per line;
one of its fields is a document. `stdlib` is the source code of the running Python's library.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sysconfig
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

from lockstep.errors import UserError
from lockstep.settings import setting
from lockstep.tokens.sources.file_documents import FileDocuments, PathDocuments, read_content
from lockstep.tokens.sources.files import File, Files
from lockstep.tokens.sources.source import BLOCK, is_utf8, reading, refuse_nul, to_utf8

logger = logging.getLogger(__name__)

NUL = rb"\u0000"  # as JSON writes it
# Installed packages aren't the library; tests are long, repetitive, and sometimes invalid code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Text(PathDocuments):
    """Your own text, a document per file or line."""

    kind: ClassVar[str] = "text"
    leaves_out: ClassVar[bool] = True

    documents: str = setting("what is one document", "file", choices=("file", "line"))

    @property
    def by_line(self) -> bool:
        """Whether a file has a document per line."""
        return self.documents == "line"

    def documents_in(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        """Return the documents in a piece of a file, and how many weren't UTF-8."""
        if path.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
            _tell_of_json(self.path)
        if not self.by_line:
            if b"\r\n" in piece:
                _tell_of_crlf(self.path)
            return super().documents_in(piece, path)
        return lines_in(piece, self.invalid_utf8, path)


@cache
def _tell_of_json(corpus: str) -> None:
    logger.warning(
        "data.source.path=%s has JSON lines, whose names and quotes become part of the training "
        "text; for the texts in them: data=jsonl",
        corpus,
    )


@cache  # once, although a tokenizer that learns reads the corpus, too
def _tell_of_crlf(corpus: str) -> None:
    logger.warning(
        "data.source.path=%s has lines that end in CRLF, as on Windows, and the CR becomes part of "
        "the training text; to remove it from a file: sed -i 's/\\r$//' FILE",
        corpus,
    )


def lines_in(piece: bytes, policy: str, path: str) -> tuple[list[bytes], int]:
    """Return the lines in a piece of a file that aren't empty, and how many weren't UTF-8."""
    text = piece
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    lines = list(filter(None, text.split(b"\n")))
    if is_utf8(piece):
        return lines, 0
    return to_utf8(lines, policy, path)


@dataclass
class JsonLines(PathDocuments):
    """Files with a JSON object per line."""

    kind: ClassVar[str] = "jsonl"
    wanted: ClassVar[str] = r"\.(jsonl|ndjson|json)(\.\w+)?$"

    field: str = setting("the field with the text", "text")

    @property
    def by_line(self) -> bool:
        """Whether a file has a document per line."""
        return True

    def documents_in(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        """Return the documents in a piece of a file, and how many weren't UTF-8."""
        lines, invalid = lines_in(piece, self.invalid_utf8, path)
        if BOM_UTF8 in piece:  # Windows begins files with it
            lines = [*filter(None, (line.removeprefix(BOM_UTF8) for line in lines))]
        texts = [self._text(line, path) for line in lines]
        if NUL in piece:
            refuse_nul(texts, self.tokenizer, path)
        return [text for text in texts if text], invalid

    def _text(self, line: bytes, path: str) -> bytes:
        try:
            text: str | None = json.loads(line.decode())[self.field]
            if text is None:  # no text, as an empty one
                return b""
            return text.encode("utf-8", "replace")  # JSON can contain half a surrogate pair
        except json.JSONDecodeError as error:
            fault = f"is not JSON ({error.msg}, at character {error.pos + 1})"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fault = f"is not a JSON object with text under data.source.field={self.field}"
        number = self._number_of(line, path)
        place = f"{path} of the corpus" + ("" if number is None else f", line {number:,}")
        remedy = f"fix it, or name another data.source.field{_remedy_of_other_json(line, path)}"
        raise UserError(f"{place}: {line[:60]!r} {fault}; {remedy}")

    def _number_of(self, line: bytes, path: str) -> int | None:
        """Return the number of the first such line in a file, which is read again up to there.

        None if the file has changed in the meantime.
        """
        number = [file.path for file in self.files].index(path)
        with reading(path), self.open(number)(path, "rb") as raw:
            lines = _split_lines(read_content(raw, path, 0, BLOCK))
            places = (place for place, text in enumerate(lines, 1) if _as_read(text) == line)
            return next(places, None)


def _remedy_of_other_json(line: bytes, path: str) -> str:
    """Return the end of a remedy if a line seems to begin JSON in another form, else nothing."""
    forms = {b"[": "'.[]'", b"{": "."}
    start = line.strip()
    if start.startswith(b"["):
        start = b"["
    if start not in forms:
        return ""
    target = shlex.quote(str(Path(path).with_suffix(".lines.jsonl")))
    command = f"jq -c {forms[start]} {shlex.quote(path)} > {target}"
    return f"; for objects in lines of their own: {command}, then set data.source.path={target}"


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


def _as_read(line: bytes) -> bytes:
    """Return a line of a file as `lines_in` returns it."""
    text = line.decode("utf-8", "replace").encode()
    return text.removesuffix(b"\r").removeprefix(BOM_UTF8)


@dataclass
class StandardLibrary(FileDocuments):
    """The `.py` files of the standard library, except `LEFT_OUT`; each is a document."""

    kind: ClassVar[str] = "stdlib"

    @cached_property
    def file_groups(self) -> list[Files]:
        """The files; raises a `UserError` if there are none."""
        folder = sysconfig.get_path("stdlib")
        files = sorted(files_below(folder, ".py", LEFT_OUT), key=lambda file: file.name)
        if not files:
            raise UserError(
                f"data=stdlib finds no .py file under {folder}; use a Python whose library is in "
                "files, or data=text"
            )
        return [Files(files)]

    @property
    def by_name(self) -> bool:
        """Whole files are held out."""
        return True


def files_below(
    folder: str, ending: str = "", left_out: Collection[str] = (), above: str = ""
) -> Iterator[File]:
    """Yield the files in a folder and its subfolders, except hidden ones, in no set order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = above + entry.name
            if entry.name in left_out or entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(entry.path, ending, left_out, f"{name}/")
            elif name.endswith(ending) and entry.is_file():
                yield File(name, entry.stat().st_size, entry.path)
