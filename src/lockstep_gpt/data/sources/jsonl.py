"""`data=jsonl`: files with a JSON object per line; one of its fields is a document."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.data.sources.file_documents import PathDocuments
from lockstep_gpt.data.sources.nul_bytes import refuse_nul
from lockstep_gpt.data.sources.text import lines_in
from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import setting

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
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{path} of the corpus has the line {line[:60]!r}, not a JSON object with text "
                f"under data.field={self.field}; name another field or fix the line"
            ) from None
