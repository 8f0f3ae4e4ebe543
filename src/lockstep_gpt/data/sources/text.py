"""`data=text`, `data=stdlib`, `data=jsonl`: text files, a document per file, line, or object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data import corpora
from lockstep_gpt.data.corpora import FEW, LONGEST, refuse_binary
from lockstep_gpt.data.tokenizer import cut
from lockstep_gpt.extras.sources.blocks import (
    BLOCK,
    Block,
    Documents,
    DocumentsData,
    Position,
    held_out,
    is_utf8,
    reading,
    valid,
)
from lockstep_gpt.extras.sources.files import Files, FilesData, content


@dataclass
class TextData(FilesData):
    """Your own text, a document per file or line."""

    source: str = setting("where the text comes from", "text", choices=("text",))
    documents: str = setting("what is one document", "file", choices=("file", "line"))


@dataclass
class StdlibData(DocumentsData):
    """Your Python standard library's source code."""

    source: str = setting("where the text comes from", "stdlib", choices=("stdlib",))


@dataclass
class JsonlData(FilesData):
    """Files with a JSON object per line."""

    source: str = setting("where the text comes from", "jsonl", choices=("jsonl",))
    field: str = setting("the field with the text", "text")


class TextFiles(Files, Documents, corpora.TextFiles):
    """Text files, plain or compressed (.gz, .zst), a document per file or per line."""

    def __init__(
        self, config: DocumentsData, path: str, by_name: bool = False, by_line: bool = False
    ) -> None:
        Files.__init__(self, path)
        Documents.__init__(self, config)
        self.val_fraction, self.invalid_utf8 = config.val_fraction, config.invalid_utf8
        self.by_line = by_line
        # Few names may select no file for validation: then the end of each file is held out.
        self.by_name = by_name or by_line or len(self.files) * config.val_fraction >= FEW

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the documents, file by file; small ones come together."""
        texts: list[bytes] = []
        val: list[bool] = []
        after, size, invalid = start, 0, 0
        for number in range(start.part, len(self.files)):
            for piece, after in self._pieces(number, start):
                refuse_binary(piece, self.files[number].path)
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
        parts = [part for text in texts for part in self.documents(text, name)]
        return [text for _, text in parts], [split == "val" for split, _ in parts]

    def _documents(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        """Return the documents in a piece of a file, and how many weren't UTF-8."""
        if not self.by_line:
            return valid([piece], self.invalid_utf8, path)
        text = piece.replace(b"\r\n", b"\n") if b"\r" in piece else piece
        lines = list(filter(None, text.split(b"\n")))
        return (lines, 0) if is_utf8(piece) else valid(lines, self.invalid_utf8, path)

    def _pieces(self, number: int, start: Position) -> Iterator[tuple[bytes, Position]]:
        """Yield a file in pieces, cut where a text may be cut, from `start` if that is in it."""
        file, before = self.files[number], self.before[number]
        offset = start.offset if start.part == number else 0
        longest = BLOCK if self.by_line else LONGEST
        rest = b""
        with reading(file.path), self.open(file.path, "rb") as raw:
            for data in content(raw, file.path, offset, longest):
                rest += data
                while len(rest) > longest and (end := self._end(rest, longest)):
                    offset += end
                    yield rest[:end], Position(number, offset, before + raw.tell())
                    rest = rest[end:]
        yield rest, Position(number + 1, 0, self.before[number + 1])

    def _end(self, text: bytes, longest: int) -> int:
        """Return where a text may be cut, however much was read; 0: nowhere yet."""
        if self.by_line:
            return text.rfind(b"\n", 0, longest) + 1 or text.find(b"\n", longest) + 1
        return cut(text[:longest])


class OwnText(TextFiles):
    """Text files, a document per file or per line."""

    def __init__(self, config: TextData) -> None:
        super().__init__(config, config.path, by_line=config.documents == "line")


class StandardLibrary(corpora.StandardLibrary, TextFiles):
    """Every `.py` file of the installed Python standard library."""


class JsonLines(TextFiles):
    """Files with a JSON object per line; one of its fields is a document."""

    wanted = r"\.(jsonl|ndjson|json)(\.\w+)?$"

    def __init__(self, config: JsonlData) -> None:
        super().__init__(config, config.path, by_line=True)
        self.field = config.field

    def _documents(self, piece: bytes, path: str) -> tuple[list[bytes], int]:
        lines, invalid = super()._documents(piece, path)
        return [text for line in lines if (text := self._text(line, path))], invalid

    def _text(self, line: bytes, path: str) -> bytes:
        try:
            text: str = json.loads(line.decode())[self.field] or ""
            return text.encode("utf-8", "replace")  # JSON can contain half a surrogate pair
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(
                f"{path} of the corpus has the line {line[:60]!r}, not a JSON object with text "
                f"under data.field={self.field}; name another field or fix the line"
            ) from None
