"""`data=text`: text files, a document per file or per line."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from lockstep.settings import setting
from lockstep.tokens.sources.file_documents import PathDocuments
from lockstep.tokens.sources.source import is_utf8, to_utf8

logger = logging.getLogger(__name__)


@dataclass
class Text(PathDocuments):
    """Your own text, a document per file or line."""

    kind: ClassVar[str] = "text"

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
