"""`data=parquet`: one column of Parquet files, a document per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data.tokenizer import library
from lockstep_gpt.extras.sources.blocks import (
    BLOCK,
    Block,
    Position,
    held_out,
    reading,
    valid,
)
from lockstep_gpt.extras.sources.files import FilesData
from lockstep_gpt.extras.sources.text import TextFiles


@dataclass
class ParquetData(FilesData):
    """Parquet files with a column of text."""

    source: str = setting("where the text comes from", "parquet", choices=("parquet",))
    column: str = setting("the column with the text", "text")


class ParquetFiles(TextFiles):
    """The rows of Parquet files, file by file."""

    wanted = r"\.parquet$"

    def __init__(self, config: ParquetData) -> None:
        super().__init__(config, config.path, by_name=True)  # no file is cut in two
        self.column = config.column

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows that aren't empty; skip whole batches of a file up to `start`."""
        parquet = library("pyarrow.parquet", "parquet")
        for number in range(start.part, len(self.files)):
            path, done = self.files[number].path, 0
            skip = start.offset if number == start.part else 0
            with reading(path), self.open(path, "rb") as raw, parquet.ParquetFile(raw) as file:
                for batch in self._batches(file, path):
                    done += len(batch)
                    if done > skip:
                        after = self._position(number, done, file.metadata.num_rows)
                        yield self._block(after, batch.column(0), path)

    def _batches(self, file: Any, path: str) -> Iterator[Any]:
        """Yield record batches of the column, about `BLOCK` bytes each, the same ones each time."""
        names = file.schema_arrow.names
        if self.column not in names:
            raise UserError(
                f"{path} of the corpus lacks the column data.column={self.column}; it has "
                f"{', '.join(names)}"
            )
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group)
            size = sum(
                rows.column(i).total_uncompressed_size
                for i in range(rows.num_columns)
                if rows.column(i).path_in_schema.split(".")[0] == self.column
            )
            many = max(1, rows.num_rows * BLOCK // max(size, 1))
            yield from file.iter_batches(many, row_groups=[group], columns=[self.column])

    def _position(self, number: int, done: int, rows: int) -> Position:
        read = self.before[number] + self.files[number].size * done // rows
        return Position(number, done, read)

    def _block(self, after: Position, column: Any, path: str) -> Block:
        texts, invalid = valid(documents_in(column), self.invalid_utf8, path)
        return Block(after, texts, held_out(texts, self.val_fraction), invalid)


def documents_in(column: Any) -> list[bytes]:
    """Return the texts in an Arrow column of strings or bytes that aren't null or empty."""
    return list(filter(None, column.cast("binary").to_pylist()))
