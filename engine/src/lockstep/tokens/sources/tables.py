"""Text in a column of tables, a document per row: `data=parquet` and `data=huggingface`.

`huggingface` is one field of a dataset that the library `datasets` can load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.optional import import_optional
from lockstep.settings import setting
from lockstep.tokens.sources.file_documents import PathDocuments
from lockstep.tokens.sources.files import File, find_files
from lockstep.tokens.sources.source import (
    BLOCK,
    Block,
    Documents,
    Position,
    reading,
    refuse_nul,
    splits_of_texts,
    to_utf8,
)

# Types of columns, as pyarrow writes them, that `texts_in` can read.
TEXT = re.compile(r"(dictionary<values=)?(large_|fixed_size_)?(string|binary)")
# The types that are the same memory.
AS_BYTES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
ROWS = 256  # that are processed together


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


@dataclass
class HuggingFaceRows(Documents):
    """A dataset on the Hugging Face hub or in a folder."""

    kind: ClassVar[str] = "huggingface"
    added_later: ClassVar[frozenset[str]] = Documents.added_later | {"val_split", "test_split"}

    path: str = setting("name on the hub, or a local folder", "", decides="place")
    subset: str | None = setting("configuration of the dataset", None)
    revision: str | None = setting("branch, tag, or commit on the hub; null: newest", None)
    split: str = setting("the split of the dataset to read", "train")
    field: str = setting("the field with the text", "text")
    streaming: bool = setting("tokenize while reading, and don't store the dataset", False)
    val_split: str | None = setting("its split to validate on; null: val_fraction of `split`", None)
    test_split: str | None = setting("its split to test on; null: test_fraction of `split`", None)

    @cached_property
    def _tables(self) -> dict[int, Any]:
        return {}  # the splits that were loaded, by their number in `parts`

    @property
    def folder(self) -> Path:
        """The local folder, if it is one."""
        return Path(self.path).expanduser()

    def identity(self) -> Any:
        """Return the files of a folder; for the hub, which isn't queried, only the name.

        So a change of a branch there isn't noticed: name a commit in `data.source.revision`.
        """
        if not self.path:
            raise UserError("data.source.path is empty; set it to a name on the hub, or a folder")
        if self.folder.is_dir():
            return find_files(str(self.folder)).identity(self.root)
        return self.path

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """Each split of the dataset to read, and our split that it is; None: it is divided."""
        parts: list[tuple[str, str | None]] = [(self.split, None)]
        if self.val_split is not None:
            parts.append((self.val_split, "val"))
        if self.test_split is not None:
            parts.append((self.test_split, "test"))
        return parts

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return self.test_split is not None or super().has_test

    @property
    def size(self) -> int | None:
        """Bytes of the field; None for a stream."""
        if self.streaming:
            return None
        sizes: list[int] = [self._rows(part).data.nbytes for part in range(len(self.parts))]
        return sum(sizes)

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows that aren't empty."""
        after = start
        for part in range(start.part, len(self.parts)):
            if part > start.part:
                after = Position(part, 0, after.read)
            rows = self._rows(part)
            if hasattr(rows, "__len__") and after.offset >= len(rows):
                continue  # `skip` doesn't accept skipping everything
            with reading(f"data.source.path={self.path}"):
                for table in rows.skip(after.offset).with_format("arrow").iter(ROWS):
                    column = table.column(self.field)
                    after = Position(part, after.offset + len(table), after.read + column.nbytes)
                    texts, invalid = to_utf8(texts_in(column), self.invalid_utf8, self.path)
                    refuse_nul(texts, self.tokenizer, f"data.source.path={self.path}")
                    yield Block(after, texts, self._splits(part, texts), invalid)

    def _splits(self, part: int, texts: list[bytes]) -> list[str]:
        _, split = self.parts[part]
        if split is not None:
            return [split] * len(texts)
        val = self.val_fraction if self.val_split is None else 0.0
        test = self.test_fraction if self.test_split is None else 0.0
        return splits_of_texts(texts, val, test)

    def _rows(self, part: int) -> Any:
        """Load a split of the dataset, or a stream of it, with only the field."""
        if part not in self._tables:
            with reading(f"data.source.path={self.path}"):
                datasets = import_optional("data=huggingface", "datasets", "huggingface")
                rows = self._load(datasets, self.parts[part][0])
                names = rows.column_names or [self.field]
                if self.field not in names:
                    raise UserError(
                        f"data.source.path={self.path} lacks the field "
                        f"data.source.field={self.field}; it has {', '.join(names)}"
                    )
                self._tables[part] = rows.select_columns(self.field)
        return self._tables[part]

    def _load(self, datasets: Any, split: str) -> Any:
        if any((self.folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(str(self.folder))  # memory-mapped: no second copy
            return saved[split] if isinstance(saved, dict) else saved
        path = str(self.folder) if self.folder.is_dir() else self.path
        return datasets.load_dataset(
            path,
            self.subset,
            split=split,
            revision=self.revision,
            streaming=self.streaming,
        )
