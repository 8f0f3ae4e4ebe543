import re

import numpy as np
import pytest

from lockstep_gpt.config import StdlibData, SyntheticData, UserError
from lockstep_gpt.data.corpora import (
    RandomTokens,
    StandardLibrary,
    open_corpus,
    split_of,
)


def library(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return StandardLibrary(root)


def test_documents_come_sorted_by_relative_path(tmp_path):
    corpus = library(tmp_path, {"b.py": b"B", "a/z.py": b"Z", "a.py": b"A", "a/b.py": b"AB"})
    assert [d.name for d in corpus.documents()] == ["a.py", "a/b.py", "a/z.py", "b.py"]
    assert [d.text for d in corpus.documents()] == [b"A", b"AB", b"Z", b"B"]


@pytest.mark.parametrize(
    "left_out",
    [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "lib2to3/tests/x.py",
        "idlelib/idle_test/x.py",
        "a/__pycache__/x.py",
        "a/readme.txt",
    ],
)
def test_what_is_not_the_library_is_left_out(tmp_path, left_out):
    corpus = library(tmp_path, {left_out: b"x", "kept.py": b"y"})
    assert [document.name for document in corpus.documents()] == ["kept.py"]


def test_files_that_are_not_utf8_are_skipped_and_counted(tmp_path):
    corpus = library(tmp_path, {"latin.py": b"\xe9", "utf8.py": "é".encode()})
    for _ in range(2):
        assert [document.name for document in corpus.documents()] == ["utf8.py"]
        assert corpus.skipped == 1


def test_an_empty_library_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path)) + ".*data=synthetic"):
        StandardLibrary(tmp_path)


def test_a_file_that_vanished_is_one_clear_line(tmp_path):
    corpus = library(tmp_path, {"a.py": b"x"})
    (tmp_path / "a.py").unlink()
    with pytest.raises(UserError, match=r"a\.py of the corpus cannot be read"):
        list(corpus.documents())


def test_identity_changes_with_names_and_sizes_only(tmp_path):
    before = library(tmp_path, {"a.py": b"12"}).identity()
    assert library(tmp_path, {"a.py": b"34"}).identity() == before
    assert library(tmp_path, {"a.py": b"123"}).identity() != before
    assert library(tmp_path, {"a.py": b"12", "b.py": b""}).identity() != before


def test_the_library_at_hand_is_found():
    names = {document.name for document in open_corpus(StdlibData()).documents()}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= names


def test_the_split_of_a_name_is_the_same_everywhere():
    names = [f"folder/module_{number}.py" for number in range(12)]
    splits = "".join(split_of(name, 0.5)[0] for name in names)
    assert splits == "vttvvvtvvvvv"


def test_the_share_of_validation_documents_is_kept():
    splits = [split_of(str(number), 0.1) for number in range(5000)]
    assert splits.count("val") == pytest.approx(500, abs=4 * (5000 * 0.1 * 0.9) ** 0.5)


def test_a_larger_share_only_adds_validation_documents():
    names = [str(number) for number in range(500)]
    small = {name for name in names if split_of(name, 0.1) == "val"}
    assert small < {name for name in names if split_of(name, 0.3) == "val"}


def random_tokens(corpus, val_fraction):
    blocks = list(corpus.blocks(val_fraction))
    return {
        name: np.concatenate([ids for split, ids in blocks if split == name])
        for name in ("train", "val")
    }


def test_random_tokens_fill_both_splits_exactly():
    splits = random_tokens(open_corpus(SyntheticData(tokens=600_001)), 0.25)
    assert (splits["train"].size, splits["val"].size) == (450_001, 150_000)


def test_random_tokens_are_the_same_everywhere():
    splits = random_tokens(RandomTokens(50_257, 100), 0.5)
    assert splits["train"][:6].tolist() == [565, 5111, 22830, 10751, 46179, 42335]
    assert splits["val"][:6].tolist() == [44237, 10835, 15193, 35073, 44428, 23067]


@pytest.mark.parametrize("vocab_size", [2, 100, 256])
def test_random_tokens_are_uniform(vocab_size):
    train = random_tokens(RandomTokens(vocab_size, 200_000), 0.01)["train"]
    counts = np.bincount(train, minlength=vocab_size)
    assert counts.size == vocab_size
    expected, freedom = train.size / vocab_size, vocab_size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5
