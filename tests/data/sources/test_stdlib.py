import re
import subprocess
import sys

import pytest

from lockstep_gpt.config import (
    StdlibData,
    TextData,
    UserError,
)
from lockstep_gpt.data.sources import stdlib as corpora
from lockstep_gpt.data.sources.stdlib import (
    StandardLibrary,
    TextFiles,
    corpus_of,
    split_of,
)

BY_NAME = 0.49  # held out of ten or more files, enough that only their names decide


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def corpus(path, **settings):
    return TextFiles(TextData(**settings), str(path))


def documents(corpus):
    """Return all documents and whether each is held out, in any section."""
    return [(text, each.split == "val") for each in corpus.stretches() for text in each.texts]


def texts(corpus):
    return {text for text, _ in documents(corpus)}


def library(root, files):
    return StandardLibrary(StdlibData(), write(root, files))


def test_documents_of_the_library_come_sorted_by_relative_path(tmp_path):
    files = {"b.py": b"B", "a/z.py": b"Z", "a.py": b"A", "a/b.py": b""}
    found = library(tmp_path, files)
    names = [file.name for file in found.files]
    assert names == ["a.py", "a/b.py", "a/z.py", "b.py"]
    for split in ("train", "val"):  # each split has its own file
        told = [text for text, held in documents(found) if held == (split == "val")]
        assert told == [files[name] for name in names if split_of(name, 0.02) == split]


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
def test_files_outside_the_library_are_left_out(tmp_path, left_out):
    found = library(tmp_path, {left_out: b"x", "kept.py": b"y"})
    assert [file.name for file in found.files] == ["kept.py"]


def test_an_empty_library_is_rejected_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path)) + ".*data=text"):
        StandardLibrary(StdlibData(), tmp_path)


def test_identity_of_the_library_changes_with_names_and_sizes_only(tmp_path):
    before = library(tmp_path, {"a.py": b"12"}).identity()
    assert library(tmp_path, {"a.py": b"34"}).identity() == before
    assert library(tmp_path, {"a.py": b"123"}).identity() != before
    assert library(tmp_path, {"a.py": b"12", "b.py": b""}).identity() != before


def test_the_library_at_hand_is_found_and_split_by_name():
    found = corpus_of(StdlibData(val_fraction=0.1))
    names = [file.name for file in found.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    held = [val for _, val in documents(found)]
    assert sum(held) == [split_of(name, 0.1) for name in names].count("val")
    assert len(held) == len(names)


FILES = {"b.txt": "bee", "a.txt": "ay", "c/d.md": "dee", ".git/x": "no", "c/.x": "no"}


@pytest.mark.parametrize(
    ("path", "found"),
    [("", ["a.txt", "b.txt", "c/d.md"]), ("b.txt", ["b.txt"]), ("c/.x", [".x"])],
)
def test_a_path_is_a_folder_or_a_file(tmp_path, path, found):
    assert [file.name for file in corpus(write(tmp_path, FILES) / path).files] == found


def test_identity_follows_changes_but_not_the_place(tmp_path):
    before = corpus(write(tmp_path / "a", {"x": "1", "y": "2"})).identity()
    (tmp_path / "a").rename(tmp_path / "b")
    assert corpus(tmp_path / "b").identity() == before
    write(tmp_path / "b", {"x": "3"})
    assert corpus(tmp_path / "b").identity() != before


@pytest.mark.parametrize("path", ["nothing", "*.txt", "empty"])
def test_a_missing_path_fails_in_one_clear_line(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.path=.* matches no file; give a file or a folder"):
        corpus(tmp_path / path)


def test_a_file_that_vanished_is_one_clear_line(tmp_path):
    found = corpus(write(tmp_path, {"a.txt": "x"}))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read: No such file"):
        texts(found)


def test_a_long_file_is_cut_between_words_into_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "LONGEST", 1000)
    text = "naïve words, and more\n" * 200
    found = corpus(write(tmp_path, {f"{n}": text for n in range(30)}), val_fraction=BY_NAME)
    parts = [text for text, _ in documents(found)]
    assert b"".join(parts) == 30 * text.encode()
    assert max(map(len, parts)) <= 1000
    assert all(part[-1:].isalnum() for part in parts if not text.endswith(part.decode()))


def test_many_files_are_held_out_whole_by_their_names(tmp_path):
    write(tmp_path, {f"{n}/x": f"text {n}" for n in range(40)})
    expected = {f"text {n}".encode(): split_of(f"{n}/x", BY_NAME) == "val" for n in range(40)}
    assert dict(documents(corpus(tmp_path, val_fraction=BY_NAME))) == expected


def test_of_one_file_the_end_is_held_out(tmp_path):
    text = "to be or not to be " * 500
    held = dict(documents(corpus(write(tmp_path, {"a": text}), val_fraction=0.1)))
    (val, train) = sorted(held, key=held.get, reverse=True)
    assert (train + val, held[train], held[val]) == (text.encode(), False, True)
    assert len(val) == pytest.approx(0.1 * len(text), abs=10)


def test_invalid_utf8_is_replaced_and_counted(tmp_path):
    files = {f"{n:02}": b"x" for n in range(30)} | {"99": b"caf\xe9"}
    found = corpus(write(tmp_path, files), val_fraction=BY_NAME)
    assert texts(found) == {b"x", b"caf\xef\xbf\xbd"}
    assert sum(each.invalid for each in found.stretches()) == 1


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


def test_libraries_that_not_everyone_has_are_imported_when_used():
    code = """import sys, lockstep_gpt.launch
from lockstep_gpt.config import data_sources
data_sources()
print({"torch", "tokenizers", "datasets", "pyarrow", "zstandard", "fsspec"} & {*sys.modules})"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n"


def test_a_compressed_file_is_rejected_and_not_read_as_text(tmp_path):
    write(tmp_path, {"a.txt": "text", "b.txt.gz": "bytes"})
    with pytest.raises(
        UserError, match=r"data\.path=.*: b\.txt\.gz is compressed; unpack it first"
    ):
        corpus(tmp_path)
