import hashlib
import json

import numpy as np
import pytest

from lockstep_gpt.config import UserError
from lockstep_gpt.data.shards import (
    FORMAT,
    Index,
    Split,
    TokenWriter,
    check_block_size,
    load_index,
    open_split,
    write_index,
)


def shards(folder, train, val, vocab_size):
    splits = {}
    for name, ids in (("train", train), ("val", val)):
        writer = TokenWriter(folder / f"{name}.bin", vocab_size)
        for piece in np.array_split(np.asarray(ids), 3):
            writer.append(piece.astype(writer.dtype))
        writer.close()
        splits[name] = writer.split()
    tokenizer = {"kind": "numbers", "vocab_size": vocab_size}
    dtype, settings = writer.dtype.str, {"source": "synthetic", "val_fraction": 0.5}
    write_index(folder, Index(FORMAT, dtype, tokenizer, "f" * 64, settings, 0, splits))
    return folder


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (257, "<u2"), (65_536, "<u2")])
def test_what_was_appended_is_read_back(tmp_path, vocab_size, dtype):
    train, val = np.arange(vocab_size), np.arange(vocab_size)[::-1]
    shards(tmp_path, train, val, vocab_size)
    np.testing.assert_array_equal(open_split(tmp_path, "train"), train)
    np.testing.assert_array_equal(open_split(tmp_path, "val"), val)
    assert np.fromfile(tmp_path / "train.bin", dtype=dtype).tolist() == train.tolist()


def test_the_index_says_what_the_files_hold(tmp_path):
    index = load_index(shards(tmp_path, range(300), range(7), 1000))
    assert index.vocab_size == 1000
    assert (index.splits["train"].tokens, index.splits["val"].tokens) == (300, 7)
    for split in index.splits.values():
        content = (tmp_path / split.file).read_bytes()
        assert split.sha256 == hashlib.sha256(content).hexdigest()


def test_a_split_is_read_only(tmp_path):
    tokens = open_split(shards(tmp_path, range(10), range(5), 100), "train")
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_documents_are_counted_with_their_text(tmp_path):
    writer = TokenWriter(tmp_path / "train.bin", 256)
    end = np.zeros(1, np.uint8)
    writer.append_document(np.frombuffer(b"abc", np.uint8), end, 3)
    writer.append_document(np.frombuffer(b"", np.uint8), end, 0)
    writer.close()
    assert (tmp_path / "train.bin").read_bytes() == b"abc\0\0"
    counts = writer.split()
    assert (counts.tokens, counts.documents, counts.text_bytes) == (5, 2, 3)


@pytest.mark.parametrize("change", [b"", b"\0" * 9, b"\0" * 11])
def test_a_file_of_another_size_is_refused_with_a_remedy(tmp_path, change):
    shards(tmp_path, range(10), range(5), 100)
    (tmp_path / "train.bin").write_bytes(change)
    with pytest.raises(UserError, match=f"{len(change)} bytes where.* 10; delete the folder"):
        open_split(tmp_path, "train")


def test_a_missing_file_is_refused(tmp_path):
    shards(tmp_path, range(10), range(5), 100)
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val\.bin cannot be read"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": 1}', b"\xff", b"3"])
def test_a_damaged_index_is_refused(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=r"index\.json is damaged; delete the folder"):
        load_index(tmp_path)


def test_a_folder_without_index_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        load_index(tmp_path)


def test_another_format_is_refused_by_number(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match=f"format 99, this version reads {FORMAT}"):
        load_index(tmp_path)


def index_of(train, val):
    splits = {"train": Split("t", train, 0, 0, ""), "val": Split("v", val, 0, 0, "")}
    return Index(FORMAT, "<u2", {"vocab_size": 9}, "", {"val_fraction": 0.1}, 0, splits)


@pytest.mark.parametrize(("tokens", "count"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_window_needs_one_token_more_than_the_block(tokens, count):
    assert index_of(tokens, 1).windows("train", 8) == count


def test_a_block_that_just_fits_passes():
    check_block_size(index_of(1000, 9), 8)


@pytest.mark.parametrize(("train", "val", "split"), [(1000, 8, "val"), (8, 1000, "train")])
def test_a_block_longer_than_a_split_is_refused_with_what_fits(train, val, split):
    with pytest.raises(UserError, match=f"{split} split has 8.*block_size to at most 7"):
        check_block_size(index_of(train, val), 8)
