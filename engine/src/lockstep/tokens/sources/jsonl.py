"""`data=jsonl`: files with a JSON object per line; one of its fields is a document."""

from __future__ import annotations

import json
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.errors import UserError
from lockstep.settings import setting
from lockstep.tokens.sources.file_documents import PathDocuments
from lockstep.tokens.sources.files import read_content
from lockstep.tokens.sources.nul_bytes import refuse_nul
from lockstep.tokens.sources.source import BLOCK, reading
from lockstep.tokens.sources.text import lines_in

NUL = rb"\u0000"  # as JSON writes it


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
