import contextlib
import hashlib
import json
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import UserError
from lockstep.tokens.shards import (
    FORMAT,
    Index,
    Shard,
    Split,
    SplitWriter,
    check_block_size,
    check_content,
    check_sizes,
    load_index,
    map_files,
    open_split,
    read_sealed,
    write_index,
    write_sealed,
)
from lockstep.tokens.tokenizer import token_dtype
from lockstep.tokens.windows import StreamWindows

LIMIT = 65_536  # number of different two-byte tokens; bytes of a small file


def index_of(train, val, dtype="<u2", vocab_size=9):
    settings = {"source": "text", "val_fraction": 0.1}
    tokenizer = {"kind": "words", "vocab_size": vocab_size}
    splits = {"train": train, "val": val}
    return Index(FORMAT, dtype, tokenizer, "f" * 64, {}, settings, splits)


def written(folder, name, ids, dtype, **limit):
    """Write ids in pieces and return their index entry."""
    with contextlib.closing(SplitWriter(folder, name, dtype, **limit)) as writer:
        for piece in np.array_split(np.asarray(ids).astype(dtype), 7):
            writer.append(piece)
        return writer.saved()


def shards(folder, train, val, vocab_size, **limit):
    dtype = token_dtype(vocab_size).newbyteorder("<").str
    parts = (("train", train), ("val", val))
    splits = [written(folder, name, ids, dtype, **limit) for name, ids in parts]
    write_index(folder, index_of(*splits, dtype, vocab_size))
    return folder


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (257, "<u2"), (65_537, "<u4")])
def test_appended_tokens_are_read_back(tmp_path, vocab_size, dtype):
    train, val = np.arange(vocab_size)[: LIMIT // 4], np.arange(vocab_size)[:99][::-1]
    shards(tmp_path, train, val, vocab_size)
    np.testing.assert_array_equal(open_split(tmp_path, "train"), train)
    np.testing.assert_array_equal(open_split(tmp_path, "val"), val)
    assert np.fromfile(tmp_path / "val-00000.bin", dtype=dtype).tolist() == val.tolist()


def test_windows_are_cut_from_one_file_however_large(tmp_path):
    ids = np.random.default_rng(0).integers(1000, size=2 * LIMIT + 5)
    shards(tmp_path, ids, range(5), 1000)
    assert [path.name for path in tmp_path.glob("train*")] == ["train-00000.bin"]
    expected = np.lib.stride_tricks.sliding_window_view(ids, 1000)[::999]
    rows = np.random.default_rng(1).permutation(len(expected))
    np.testing.assert_array_equal(StreamWindows(tmp_path, "train", 999)[rows], expected[rows])


@pytest.mark.parametrize("limit", [{}, {"limit": LIMIT}], ids=["one file", "several"])
@pytest.mark.parametrize("tokens", [10, LIMIT])
def test_a_split_is_read_only(tmp_path, tokens, limit):
    mapped = open_split(shards(tmp_path, range(tokens), range(5), LIMIT, **limit), "train")
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1


def test_the_index_describes_the_files(tmp_path):
    index = load_index(shards(tmp_path, range(LIMIT), range(7), LIMIT))
    assert index.tokenizer["vocab_size"] == LIMIT
    assert (index.splits["train"].tokens, index.splits["val"].tokens) == (LIMIT, 7)
    assert {shard.file for shard in index.shards} == {path.name for path in tmp_path.glob("*.bin")}
    for shard in index.shards:
        content = (tmp_path / shard.file).read_bytes()
        assert len(content) == 2 * shard.tokens
        assert shard.sha256 == hashlib.sha256(content).hexdigest()


def test_documents_are_counted_with_their_text(tmp_path):
    with contextlib.closing(SplitWriter(tmp_path, "val", "u1")) as writer:
        writer.append(np.frombuffer(b"abc\0\0", np.uint8), 2, 3)
        writer.append(np.frombuffer(b"d\0", np.uint8), 1, 1)
        split = writer.saved()
    assert (split.tokens, split.documents, split.text_bytes) == (7, 3, 4)


def test_a_changed_byte_is_found_by_the_checksum(tmp_path):
    index = load_index(shards(tmp_path, range(10), range(5), 100))
    check_content(tmp_path, index)
    with (tmp_path / "val-00000.bin").open("r+b") as file:
        file.write(b"x")
    check_sizes(tmp_path, index)
    with pytest.raises(UserError, match=r"val-00000.bin does not match its SHA-256; delete"):
        check_content(tmp_path, index)


@pytest.mark.parametrize("change", [b"", b"\0" * 9, b"\0" * 11])
def test_a_file_of_another_size_is_rejected_with_a_remedy(tmp_path, change):
    shards(tmp_path, range(10), range(5), 100)
    (tmp_path / "train-00000.bin").write_bytes(change)
    with pytest.raises(UserError, match=f"{len(change)} bytes, but.* 10; delete the folder"):
        open_split(tmp_path, "train")


def test_a_missing_file_is_rejected(tmp_path):
    shards(tmp_path, range(10), range(5), 100)
    (tmp_path / "val-00000.bin").unlink()
    with pytest.raises(UserError, match=r"val-00000\.bin cannot be read"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": 2}', b"\xff", b"3"])
def test_a_damaged_index_is_rejected(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=r"index\.json is damaged; delete the folder"):
        load_index(tmp_path)


def test_a_folder_without_index_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        load_index(tmp_path)


def test_another_format_is_rejected_by_number(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match=f"format 99, this version reads {FORMAT}"):
        load_index(tmp_path)


def test_a_split_is_one_part_unless_a_mixture_names_several():
    index = index_of(Split(9), Split(8))
    assert index.parts("train") == {"": "train"}
    splits = {"train": Split(9), "b/train": Split(4), "val": Split(8), "a/train": Split(5)}
    mixed = replace(index, splits=splits)
    assert mixed.parts("train") == {"b": "b/train", "a": "a/train"}
    assert mixed.parts("val") == {"": "val"}


def of_sizes(train, val):
    return index_of(Split(train), Split(val))


@pytest.mark.parametrize(("tokens", "count"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_window_needs_one_token_more_than_the_block(tokens, count):
    assert of_sizes(tokens, 1).windows("train", 8) == count


def test_a_block_that_just_fits_passes():
    check_block_size(of_sizes(1000, 9), 8)


@pytest.mark.parametrize(("train", "val", "split"), [(1000, 8, "val"), (8, 1000, "train")])
def test_a_block_longer_than_a_split_is_rejected_with_the_longest_that_fits(train, val, split):
    with pytest.raises(UserError, match=f"{split} split has 8; set at most 7") as caught:
        check_block_size(of_sizes(train, val), 8)
    assert str(caught.value).endswith("give it more data (data.source.val_fraction=0.1)")


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_split_that_no_block_fits_is_not_answered_with_a_smaller_one(tokens):
    with pytest.raises(UserError, match=rf"the val split has {tokens}; give it more data \(data\."):
        check_block_size(of_sizes(1000, tokens), 8)


@pytest.mark.parametrize(
    ("share", "hint"), [({"test_fraction": 0.3}, " (data.source.test_fraction=0.3)"), ({}, "")]
)
def test_a_block_longer_than_the_test_split_names_its_own_setting(share, hint):
    index = of_sizes(1000, 1000)
    index.splits["test"] = Split(8)
    index.settings.update(share)
    with pytest.raises(UserError, match="the test split has 8; set at most 7") as caught:
        check_block_size(index, 8)
    assert str(caught.value).endswith(f"give it more data{hint}")


def test_any_changed_value_of_an_index_is_found(tmp_path):
    shards(tmp_path, range(10), range(5), 100)
    path = tmp_path / "index.json"
    content = path.read_bytes()
    expected = load_index(tmp_path)
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            assert load_index(tmp_path) == expected  # another kind of white space
    path.write_text(json.dumps(json.loads(content)))
    assert load_index(tmp_path) == expected


def test_an_index_without_its_own_hash_is_one_of_an_earlier_version(tmp_path):
    expected = load_index(shards(tmp_path, range(10), range(5), 100))
    values = json.loads((tmp_path / "index.json").read_text())
    del values["sha256"]
    (tmp_path / "index.json").write_text(json.dumps(values))
    assert load_index(tmp_path) == expected


def test_a_value_that_only_another_version_records_of_a_split_is_ignored(tmp_path):
    expected = load_index(shards(tmp_path, range(10), range(5), 100))
    values = read_sealed(tmp_path / "index.json")
    values["splits"]["train"]["more"] = 1
    write_sealed(tmp_path / "index.json", values)
    assert load_index(tmp_path) == expected


def test_tokens_that_cannot_be_read_are_named(tmp_path):
    index = load_index(shards(tmp_path, range(10), range(5), 100))
    path = tmp_path / "train-00000.bin"
    size = path.stat().st_size
    path.unlink()
    path.mkdir()
    named = Shard(path.name, path.stat().st_size, "")  # a folder of the size that is expected
    assert size != named.tokens
    index = replace(index, splits={**index.splits, "train": Split(named.tokens, shards=[named])})
    write_index(tmp_path, index)
    with pytest.raises(UserError, match=r"train-00000\.bin cannot be mapped \(Is a directory\)"):
        open_split(tmp_path, "train")
    with pytest.raises(UserError, match=r"train-00000\.bin cannot be read \(Is a directory\)"):
        check_content(tmp_path, index)


def small_shards(*arguments):
    """Write shards in files of at most `LIMIT` bytes."""
    return shards(*arguments, limit=LIMIT)


@pytest.mark.parametrize("tokens", [LIMIT // 2, LIMIT // 2 + 1, 2 * LIMIT, 2 * LIMIT + 5])
def test_files_of_bounded_size_map_as_one_array(tmp_path, tokens):
    ids = np.random.default_rng(0).integers(1000, size=tokens)
    small_shards(tmp_path, ids, range(5), 1000)
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
    small_shards(tmp_path, range(LIMIT), range(5), LIMIT)
    mapped = open_split(tmp_path, "train")
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del mapped
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_the_index_describes_several_files(tmp_path):
    index = load_index(small_shards(tmp_path, range(LIMIT), range(7), LIMIT))
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
