"""litData's folders of tokens: an index.json, and chunks that it names.

The format is what litdata's `optimize(..., item_loader=TokensLoader())` writes, as in its
streaming/writer.py. A chunk has, little-endian: the number of its items (uint32), where each
begins and the last ends (uint32), then the tokens of all items. The index names the chunks in
order, with the number of items (`chunk_size`) and of tokens (`dim`) of each. `chunk_bytes` is not
used: later versions count the start of the chunk, early ones do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NoReturn, TypeGuard

import numpy as np

from lockstep_gpt.data.sources.files import File
from lockstep_gpt.data.sources.source import reading
from lockstep_gpt.data.sources.token_formats import Layout, Opener
from lockstep_gpt.errors import UserError

INDEX = "index.json"
CHUNK = "chunk-"  # begins the names of chunks
WORD = 4  # bytes of the numbers that a chunk begins with
# Codes of the types, from litdata/constants.py; those that are left out are not integers.
TENSOR_TYPES = {
    11: "u1",
    12: "i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    20: "<u2",
}
ARRAY_TYPES = dict(enumerate(("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8")))
TYPES = {"no_header_tensor": TENSOR_TYPES, "no_header_numpy": ARRAY_TYPES}
AGAIN = "write it again with litdata's optimize(..., item_loader=TokensLoader())"


@dataclass
class LitDataChunk:
    """A chunk of tokens."""

    remedy: ClassVar[str] = "raise it"

    file: File
    open: Opener
    dtype: np.dtype[Any]
    items: int
    tokens: int

    @property
    def skip(self) -> int:
        """The bytes before the tokens."""
        return WORD * (1 + self.items + 1)

    def layout(self, raw: BinaryIO) -> Layout:
        """Return the layout that the index tells.

        Raises:
            UserError: the chunk has other items.
        """
        items = int.from_bytes(raw.read(WORD), "little")
        if items != self.items:
            raise UserError(
                f"{self.file.path} of the corpus has {items:,} items, but {self.items:,} in its "
                f"{INDEX}; copy the folder again"
            )
        return Layout(self.dtype, self.tokens, self.skip)


def read_index(index: File, files: Mapping[str, File], opener: Opener) -> list[LitDataChunk]:
    """Return the chunks that an index names, in its order.

    Args:
        index: the index.
        files: the corpus's files, by path.
        opener: what opens them.

    Raises:
        UserError: the index is damaged or isn't one of tokens, or a chunk is missing or has
            another size.
    """
    with reading(index.path), opener(index.path, "rb") as raw:
        content = raw.read()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        _refuse(index, "is not JSON", "copy the folder again")
    known = values if isinstance(values, dict) else {}
    config = known.get("config")
    entries = known.get("chunks")
    if not isinstance(config, dict) or not isinstance(entries, list):
        _refuse(
            index,
            "is not an index of litData, with `config` and `chunks`",
            "name the token files alone, as in data.path=FOLDER/*.bin",
        )
    dtype = _dtype(index, config)
    return [_chunk(index, entry, dtype, files, opener) for entry in entries]


def _dtype(index: File, config: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the type of the tokens."""
    for name in ("compression", "encryption"):
        if config.get(name):
            _refuse(index, f"has chunks with {name}, which is not read", f"{AGAIN} and no {name}")
    loader = config.get("item_loader", "TokensLoader")  # early versions don't record it
    if loader != "TokensLoader":
        _refuse(index, f"has items for {loader}, not tokens", AGAIN)
    formats = config.get("data_format")
    if not isinstance(formats, list) or len(formats) != 1:
        _refuse(index, f"has items of {formats}, not tokens alone", AGAIN)
    kind, _, code = str(formats[0]).partition(":")
    if kind not in TYPES or not code.isdecimal():
        _refuse(index, f"has items of {formats[0]}, not tokens", AGAIN)
    if int(code) not in TYPES[kind]:
        _refuse(index, f"has items of {formats[0]}, which are not integers", AGAIN)
    return np.dtype(TYPES[kind][int(code)])


def _chunk(
    index: File,
    entry: Any,
    dtype: np.dtype[Any],
    files: Mapping[str, File],
    opener: Opener,
) -> LitDataChunk:
    """Return a chunk that the index names."""
    known = entry if isinstance(entry, dict) else {}
    name = known.get("filename")
    items = known.get("chunk_size")
    tokens = known.get("dim")
    if not isinstance(name, str) or not _is_count(items):
        _refuse(index, "has a chunk without `filename` or `chunk_size`", "copy the folder again")
    if not _is_count(tokens):
        _refuse(index, f"has no number of tokens (`dim`) for {name}", AGAIN)
    folder = index.path.removesuffix(INDEX)
    file = files.get(folder + name)
    if file is None:
        _refuse(index, f"names {name}, which is missing", "set data.path to the whole folder")
    chunk = LitDataChunk(file, opener, dtype, items, tokens)
    expected = chunk.skip + tokens * dtype.itemsize
    if file.size != expected:
        raise UserError(
            f"{file.path} of the corpus has {file.size:,} bytes, but {expected:,} in its {INDEX}; "
            "copy the folder again"
        )
    return chunk


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value >= 0


def _refuse(index: File, fault: str, remedy: str) -> NoReturn:
    raise UserError(f"{index.path} {fault}; {remedy}")
