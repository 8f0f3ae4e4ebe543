"""`data=parquet`: one column of Parquet files, a document per row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.optional import import_optional
from lockstep.settings import setting
from lockstep.tokens.sources.file_documents import PathDocuments
from lockstep.tokens.sources.files import File
from lockstep.tokens.sources.nul_bytes import refuse_nul
from lockstep.tokens.sources.source import (
    BLOCK,
    Block,
    Position,
    reading,
    to_utf8,
)

# Types of columns, as pyarrow writes them, that `texts_in` can read.
TEXT = re.compile(r"(dictionary<values=)?(large_|fixed_size_)?(string|binary)")
# The types that are the same memory.
AS_BYTES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}


@dataclass
class ParquetFiles(PathDocuments):
    """Parquet files with a column of text."""

    kind: ClassVar[str] = "parquet"
    wanted: ClassVar[str] = r"\.parquet$"

    column: str = setting("the column with the text", "text")

    @property
    def by_line(self) -> bool:
        """Each row is a document."""
        return True

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows that aren't empty; skip whole batches of a file up to `start`."""
        parquet = import_optional("data=parquet", "pyarrow.parquet", "parquet")
        for number in range(start.part, len(self.files)):
            file = self.files[number]
            done = 0
            skip = start.offset_in(number)
            with (
                reading(file.path),
                self.open(number)(file.path, "rb") as raw,
                parquet.ParquetFile(raw) as table,
            ):
                for batch in self._batches(table, file.path):
                    done += len(batch)
                    if done > skip:
                        after = self._position(number, done, table.metadata.num_rows)
                        yield self._block(after, batch.column(0), file)

    def _batches(self, table: Any, path: str) -> Iterator[Any]:
        """Yield record batches of the column, about `BLOCK` bytes each, the same ones each time."""
        check_column(table.schema_arrow, self.column, path)
        for group in range(table.metadata.num_row_groups):
            rows = table.metadata.row_group(group)
            size = sum(
                rows.column(i).total_uncompressed_size
                for i in range(rows.num_columns)
                if rows.column(i).path_in_schema.split(".")[0] == self.column
            )
            many = max(1, rows.num_rows * BLOCK // max(size, 1))
            yield from table.iter_batches(many, row_groups=[group], columns=[self.column])

    def _position(self, number: int, done: int, rows: int) -> Position:
        read = self.before[number] + self.files[number].size * done // rows
        return Position(number, done, read)

    def _block(self, after: Position, column: Any, file: File) -> Block:
        texts, invalid = to_utf8(texts_in(column), self.invalid_utf8, file.path)
        refuse_nul(texts, self.tokenizer, file.path)
        if file.split:
            return Block(after, texts, [file.split] * len(texts), invalid)
        return Block(after, texts, self.splits_of(texts), invalid)


def check_column(schema: Any, column: str, path: str) -> None:
    """Raise a `UserError` if a table has no such column, or one that isn't text."""
    if column not in schema.names:
        raise UserError(
            f"{path} of the corpus lacks the column data.source.column={column}; it has "
            f"{', '.join(schema.names)}"
        )
    kind = str(schema.field(column).type)
    if not TEXT.match(kind):
        raise UserError(
            f"{path} of the corpus has {kind} in the column data.source.column={column}, not text; "
            f"it has {', '.join(schema.names)}"
        )


def texts_in(column: Any) -> list[bytes]:
    """Return the texts in an Arrow column of strings or bytes that aren't null or empty.

    Raises:
        ValueError: the column is damaged: reading where its offsets point would end the process.
    """
    for part in getattr(column, "chunks", [column]):
        # As bytes: `data.source.invalid_utf8` decides what happens with text that isn't UTF-8.
        kind = AS_BYTES.get(str(part.type), part.type)
        part.view(kind).validate(full=True)
    return list(filter(None, column.cast("binary").to_pylist()))
