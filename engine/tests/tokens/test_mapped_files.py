import contextlib
import hashlib
import mmap
from pathlib import Path

import numpy as np
import pytest

from lockstep.tokens.mapped_files import map_files
from lockstep.tokens.shards import (
    FORMAT,
    Index,
    Split,
    load_index,
    open_split,
    write_index,
)
from lockstep.tokens.split_writer import SplitWriter
from lockstep.tokens.tokenizer import token_dtype
from lockstep.tokens.windows import StreamWindows

LIMIT = 65_536  # bytes of a file


def index_of(train, val, dtype="<u2", vocab_size=9):
    settings = {"source": "synthetic", "val_fraction": 0.1}
    tokenizer = {"kind": "numbers", "vocab_size": vocab_size}
    splits = {"train": train, "val": val}
    return Index(FORMAT, dtype, tokenizer, "f" * 64, {}, settings, splits)


def written(folder, name, ids, dtype):
    """Write ids in pieces and return their index entry."""
    with contextlib.closing(SplitWriter(folder, name, dtype, LIMIT, Split())) as writer:
        for piece in np.array_split(np.asarray(ids).astype(dtype), 7):
            writer.append(piece)
        return writer.saved()


def shards(folder, train, val, vocab_size):
    dtype = token_dtype(vocab_size).newbyteorder("<").str
    splits = [written(folder, name, ids, dtype) for name, ids in (("train", train), ("val", val))]
    write_index(folder, index_of(*splits, dtype, vocab_size))
    return folder


@pytest.mark.parametrize("tokens", [LIMIT // 2, LIMIT // 2 + 1, 2 * LIMIT, 2 * LIMIT + 5])
def test_files_of_bounded_size_map_as_one_array(tmp_path, tokens):
    ids = np.random.default_rng(0).integers(1000, size=tokens)
    shards(tmp_path, ids, range(5), 1000)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("train*"))]
    assert max(sizes) <= LIMIT
    assert len(sizes) == -(-2 * tokens // LIMIT)
    mapped = open_split(tmp_path, "train")
    np.testing.assert_array_equal(mapped, ids)
    assert mapped[LIMIT // 2 - 3 : LIMIT // 2 + 3].tolist() == ids[LIMIT // 2 - 3 :][:6].tolist()
    expected = np.lib.stride_tricks.sliding_window_view(ids, 1000)[::999]
    rows = np.random.default_rng(1).permutation(len(expected))
    np.testing.assert_array_equal(StreamWindows(tmp_path, "train", 999)[rows], expected[rows])


def test_a_mapping_of_several_files_is_given_back(tmp_path):
    shards(tmp_path, range(LIMIT), range(5), LIMIT)
    mapped = open_split(tmp_path, "train")
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del mapped
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("tokens", [10, LIMIT])
def test_a_split_is_read_only(tmp_path, tokens):
    mapped = open_split(shards(tmp_path, range(tokens), range(5), LIMIT), "train")
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1


def test_the_index_describes_the_files(tmp_path):
    index = load_index(shards(tmp_path, range(LIMIT), range(7), LIMIT))
    assert (index.splits["train"].tokens, index.splits["val"].tokens) == (LIMIT, 7)
    assert {shard.file for shard in index.shards} == {path.name for path in tmp_path.glob("*.bin")}
    for shard in index.shards:
        content = (tmp_path / shard.file).read_bytes()
        assert len(content) == 2 * shard.tokens
        assert shard.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    "sizes", [[[5], [7]], [[LIMIT, 3], [9]], [[LIMIT, LIMIT], [1], [LIMIT, 2]]]
)
def test_each_group_of_files_begins_on_a_page_and_is_whole(tmp_path, sizes):
    groups, content = [], []
    for place, group in enumerate(sizes):
        groups.append([tmp_path / f"{place}-{number}" for number in range(len(group))])
        pieces = [np.random.default_rng(size + place).bytes(size) for size in group]
        for path, piece in zip(groups[-1], pieces, strict=True):
            path.write_bytes(piece)
        content.append(b"".join(pieces))
    mapped, starts = map_files(groups)
    assert all(start % mmap.PAGESIZE == 0 for start in starts)
    for start, expected in zip(starts, content, strict=True):
        assert mapped[start : start + len(expected)].tobytes() == expected


def test_a_file_that_cannot_be_mapped_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    with pytest.raises(OSError, match="No such file") as caught:
        map_files([[tmp_path / "a"], [tmp_path / "b"]])
    assert caught.value.filename == str(tmp_path / "b")
