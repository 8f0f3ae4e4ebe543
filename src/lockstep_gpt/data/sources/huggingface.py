"""`data=huggingface`: one field of a dataset that the `datasets` library can load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep_gpt.config import UserError, setting
from lockstep_gpt.data.tokenizer import library
from lockstep_gpt.extras.sources.blocks import (
    Block,
    Documents,
    DocumentsData,
    Position,
    held_out,
    reading,
    valid,
)
from lockstep_gpt.extras.sources.files import Files
from lockstep_gpt.extras.sources.parquet import documents_in

ROWS = 256  # that are processed together


@dataclass
class HuggingfaceData(DocumentsData):
    """A dataset on the Hugging Face hub or in a folder."""

    source: str = setting("where the text comes from", "huggingface", choices=("huggingface",))
    path: str = setting("name on the hub, or a local folder", "", on_resume="machine")
    subset: str | None = setting("configuration of the dataset", None)
    revision: str | None = setting("branch, tag, or commit on the hub; null: newest", None)
    split: str = setting("the split of the dataset to read", "train")
    field: str = setting("the field with the text", "text")
    streaming: bool = setting("tokenize while reading, and don't store the dataset", False)


class HuggingfaceRows(Documents):
    """The rows of one split."""

    config: HuggingfaceData
    held_out = "whole documents"  # by their text

    def __init__(self, config: HuggingfaceData) -> None:
        super().__init__(config)
        self.folder = Path(config.path).expanduser()
        self.local = self.folder.is_dir()

    def identity(self) -> Any:
        """Return the files of a folder; for the hub, which isn't queried, only the name.

        So a change of a branch there isn't noticed: name a commit in `data.revision`.
        """
        return Files(str(self.folder)).identity() if self.local else self.config.path

    @property
    def size(self) -> int | None:  # type: ignore[override] # known late
        """Bytes of the field; None for a stream."""
        return None if self.config.streaming else self._rows.data.nbytes

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows that aren't empty."""
        config, after, rows = self.config, start, self._rows
        if hasattr(rows, "__len__") and start.offset >= len(rows):
            return  # `skip` doesn't accept skipping everything
        with reading(f"data.path={config.path}"):
            for table in rows.skip(start.offset).with_format("arrow").iter(ROWS):
                column = table.column(config.field)
                read = after.read + column.nbytes
                after = Position(0, after.offset + len(table), read)
                texts, invalid = valid(documents_in(column), config.invalid_utf8, config.path)
                yield Block(after, texts, held_out(texts, config.val_fraction), invalid)

    @cached_property
    def _rows(self) -> Any:
        """Load the dataset, or a stream of it, with only this field."""
        config = self.config
        with reading(f"data.path={config.path}"):
            rows = self._load(library("datasets", "huggingface"))
            if config.field not in (names := rows.column_names or [config.field]):
                raise UserError(
                    f"data.path={config.path} lacks the field data.field={config.field}; it has "
                    f"{', '.join(names)}"
                )
            return rows.select_columns(config.field)

    def _load(self, datasets: Any) -> Any:
        config = self.config
        if any((self.folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(str(self.folder))  # memory-mapped: no second copy
            return saved[config.split] if isinstance(saved, dict) else saved
        return datasets.load_dataset(
            str(self.folder) if self.local else config.path,
            config.subset,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
