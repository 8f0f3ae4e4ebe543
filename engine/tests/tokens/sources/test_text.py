import gzip
import json
import re
import subprocess
import sys
import uuid

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.tokens.sources import file_documents as module
from lockstep.tokens.sources.source import Position, split_of_name, splits_of_texts
from lockstep.tokens.sources.text import JsonLines, StandardLibrary, Text

BY_NAME = 0.49  # held out of ten or more files, enough that only their names decide


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def corpus(path, **settings):
    return Text(path=str(path), **settings)


def lines(path, **settings):
    return corpus(path, documents="line", **settings)


START = Position()


def blocks(corpus, start=START):
    return list(corpus.blocks(start))


def texts(corpus):
    return [text for block in blocks(corpus) for text in block.texts]


def documents(corpus):
    """Return all documents, or parts of them, with their splits."""
    all_blocks = blocks(corpus)
    return [pair for block in all_blocks for pair in zip(block.texts, block.splits, strict=True)]


FILES = {"b.txt": "bee", "a.txt": "ay", "c/d.md": "dee", ".git/x": "no", "c/.x": "no"}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("", ["a.txt", "b.txt", "c/d.md"]),
        ("b.txt", ["b.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.md", ["c/d.md"]),
        ("c/.x", [".x"]),
    ],
)
def test_a_path_is_a_folder_a_file_or_a_glob(tmp_path, path, names):
    assert [file.name for file in corpus(write(tmp_path, FILES) / path).files] == names


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_url_is_read_like_a_local_path(tmp_path, protocol):
    write(tmp_path, {"a.txt": "one", "b/c.txt": "two\nthree", "d.txt.gz": gzip.compress(b"4")})
    root = f"/{uuid.uuid4()}" if protocol == "memory" else str(tmp_path)
    if protocol == "memory":
        fsspec.filesystem("memory").put(f"{tmp_path}/", root, recursive=True)
    far, near = lines(f"{protocol}://{root}"), lines(tmp_path)
    assert [file[:2] for file in far.files] == [file[:2] for file in near.files]
    assert texts(far) == texts(near) == [b"one", b"two", b"three", b"4"]


def test_identity_of_a_server_changes_when_a_file_there_does():
    url = f"memory://{uuid.uuid4()}/a.txt"
    fsspec.filesystem("memory").pipe(url, b"one")
    before = corpus(url).identity()
    assert corpus(url).identity() == before
    fsspec.filesystem("memory").pipe(url, b"two")
    assert corpus(url).identity() != before


def test_identity_follows_changes_but_not_the_place(tmp_path):
    before = corpus(write(tmp_path / "a", {"x": "1", "y": "2"})).identity()
    (tmp_path / "a").rename(tmp_path / "b")
    assert corpus(tmp_path / "b").identity() == before
    write(tmp_path / "b", {"x": "3"})
    assert corpus(tmp_path / "b").identity() != before


@pytest.mark.parametrize("path", ["nothing", "*.txt", "empty"])
def test_a_missing_path_fails_in_one_clear_line(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.source\.path=.* matches no file; give"):
        corpus(tmp_path / path).identity()


def test_an_unknown_protocol_is_one_clear_line():
    with pytest.raises(UserError, match=r"data\.source\.path=zz://a cannot be read: .*zz"):
        corpus("zz://a").identity()


PACKED = {"a.txt": bytes, "a.txt.gz": gzip.compress, "a.txt.zst": zstandard.compress}


@pytest.mark.parametrize(("name", "pack"), PACKED.items())
def test_packed_files_are_unpacked_by_their_name(tmp_path, name, pack):
    write(tmp_path, {name: pack(b"one\ntwo\n") + pack(b"three")})  # as parallel packers write
    assert texts(lines(tmp_path)) == [b"one", b"two", b"three"]


@pytest.mark.parametrize(("name", "pack"), [*PACKED.items()][1:])
@pytest.mark.parametrize("damage", ["truncated", "garbled"])
def test_a_damaged_packed_file_is_one_clear_line(tmp_path, name, pack, damage):
    packed = pack(np.random.default_rng(0).bytes(5000))
    write(tmp_path, {name: packed[:-9] if damage == "truncated" else b"x" + packed})
    with pytest.raises(UserError, match=rf"{re.escape(name)} cannot be read: .*; fix it"):
        texts(lines(tmp_path))


def test_a_file_that_vanished_is_one_clear_line(tmp_path):
    source = corpus(write(tmp_path, {"a.txt": "x"}))
    assert [file.name for file in source.files] == ["a.txt"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read: No such file"):
        texts(source)


def test_lines_are_documents_with_any_line_ending(tmp_path):
    write(tmp_path, {"a": "one\r\n\r\n two \n\nthree", "b": "", "c": "\n"})
    assert texts(lines(tmp_path)) == [b"one", b" two ", b"three"]


LINES = st.lists(
    st.binary(max_size=9).filter(lambda line: not set(line) & {0, 10, 13}), max_size=30
)


@given(files=st.lists(LINES, max_size=4), size=st.integers(1, 20))
def test_lines_are_the_same_however_the_files_are_read(tmp_path_factory, files, size):
    root = tmp_path_factory.mktemp("lines")
    write(
        root,
        {f"{number}": b"\n".join(rows) for number, rows in enumerate(files)} | {"z": b"z"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", size)
        for name in ("text", "source"):
            patch.setattr(f"lockstep.tokens.sources.{name}.is_utf8", lambda _: True)
        expected = [line for rows in files for line in rows if line]
        assert texts(lines(root)) == [*expected, b"z"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_line", [False, True])
def test_reading_resumes_at_any_block(tmp_path, monkeypatch, packed, by_line):
    monkeypatch.setattr(module, "BLOCK", 50)
    monkeypatch.setattr(module, "LONGEST", 100)
    pack, ending = (gzip.compress, ".gz") if packed else (bytes, "")
    text = [" ".join(map(str, range(n, n + 99))).encode().replace(b"7 ", b"\n") for n in range(5)]
    write(tmp_path, {f"{n}{ending}": pack(content) for n, content in enumerate(text)})
    source = lines(tmp_path) if by_line else corpus(tmp_path)
    all_blocks = blocks(source)
    assert len(all_blocks) > 9
    for number, block in enumerate(all_blocks):
        rest = all_blocks[number + 1 :] or [all_blocks[-1]._replace(texts=[], splits=[])]
        for again, expected in zip(blocks(source, block.after), rest, strict=True):
            assert again[1:] == expected[1:]
            assert again.after[:2] == expected.after[:2]


def test_positions_rise_to_the_size_of_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 100)
    source = corpus(write(tmp_path, {"a": "word " * 99, "b.gz": gzip.compress(b"x" * 999)}))
    read = [block.after.read for block in source.blocks(START)]
    assert read == sorted(read)
    assert read[-1] == source.size == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_long_file_is_cut_between_words_into_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 1000)
    text = "naïve words, and more\n" * 200
    source = corpus(write(tmp_path, {f"{n}": text for n in range(30)}), val_fraction=BY_NAME)
    parts = texts(source)
    assert b"".join(parts) == 30 * text.encode()
    assert max(map(len, parts)) <= 1000
    assert all(part[-1:].isalnum() for part in parts if not text.endswith(part.decode()))


def test_many_files_are_held_out_whole_by_their_names(tmp_path):
    write(tmp_path, {f"{n}/x": f"text {n}" for n in range(40)})
    splits_by_text = dict(documents(corpus(tmp_path, val_fraction=BY_NAME)))
    expected = {f"text {n}".encode(): split_of_name(f"{n}/x", BY_NAME, 0) for n in range(40)}
    assert splits_by_text == expected


def test_of_one_file_the_end_is_held_out(tmp_path):
    text = "to be or not to be " * 500
    (block,) = blocks(corpus(write(tmp_path, {"a": text}), val_fraction=0.1))
    assert b"".join(block.texts) == text.encode()
    assert block.splits == ["train", "val"]
    assert len(block.texts[1]) == pytest.approx(0.1 * len(text), abs=10)


def test_equal_documents_are_never_in_both_splits(tmp_path):
    written = [f"document {n % 50}" for n in range(500)]
    source = lines(write(tmp_path, {"a": "\n".join(written)}), val_fraction=0.5)
    splits = {text: set() for text in texts(source)}
    for text, split in documents(source):
        splits[text].add(split)
    assert {tuple(names) for names in splits.values()} == {("train",), ("val",)}


BAD = b"caf\xe9"


@pytest.mark.parametrize("by_line", [False, True])
@pytest.mark.parametrize(("policy", "expected"), [("replace", [b"caf\xef\xbf\xbd"]), ("skip", [])])
def test_invalid_utf8_is_replaced_or_skipped_and_counted(tmp_path, by_line, policy, expected):
    files = {"a": b"x\n" + BAD} if by_line else {f"{n:02}": b"x" for n in range(30)} | {"99": BAD}
    settings = {"invalid_utf8": policy, "val_fraction": BY_NAME}
    source = (lines if by_line else corpus)(write(tmp_path, files), **settings)
    assert set(texts(source)) == {b"x", *expected}
    assert sum(block.invalid for block in source.blocks(START)) == 1


@pytest.mark.parametrize("by_line", [False, True])
def test_invalid_utf8_fails_with_the_file_s_name_if_set(tmp_path, by_line):
    source = (lines if by_line else corpus)(write(tmp_path, {"a": BAD}), invalid_utf8="fail")
    with pytest.raises(
        UserError, match=r"/a of the corpus is not UTF-8: .*data\.source\.invalid_utf8"
    ):
        texts(source)


@pytest.mark.parametrize("by_line", [False, True])
def test_the_place_of_a_byte_that_is_not_utf8_is_counted_from_the_file_s_start(tmp_path, by_line):
    text = b"some words\n" * 600_000 + "caf\u00e9".encode("latin-1")  # several pieces
    source = (lines if by_line else corpus)(write(tmp_path, {"a": text}), invalid_utf8="fail")
    with pytest.raises(UserError, match=rf"byte {len(text) - 1:,} is 0xE9; convert it .*iconv"):
        texts(source)


def test_the_command_that_converts_a_file_makes_it_readable(tmp_path):
    source = corpus(write(tmp_path, {"a b": "caf\u00e9".encode("latin-1")}), invalid_utf8="fail")
    with pytest.raises(UserError) as caught:
        texts(source)
    command = str(caught.value).partition("Latin-1: ")[2].partition("; or ")[0]
    subprocess.run(command, shell=True, check=True)
    assert b"".join(texts(corpus(tmp_path, invalid_utf8="fail"))) == "caf\u00e9".encode()


def test_line_ends_of_windows_are_told_once_and_only_where_they_are_kept(tmp_path, caplog):
    path = write(tmp_path, {"a": b"one\r\ntwo\r\n", "b": b"three\r\n"})
    texts(lines(path))
    assert caplog.text == ""
    texts(corpus(path))
    texts(corpus(path))
    assert caplog.text.count(f"data.source.path={path} has lines that end in CRLF") == 1


def test_json_lines_read_as_text_are_told_once(tmp_path, caplog):
    path = write(tmp_path, {"a.jsonl": '{"text": "x"}\n' * 9, "b.jsonl": '{"text": "y"}\n'})
    assert len(list(corpus(path).blocks(Position()))) > 0
    assert caplog.text.count(f"data.source.path={path} has JSON lines") == 1
    assert caplog.text.strip().endswith("data=jsonl")


def json_lines(root, **settings):
    return JsonLines(path=str(root), **settings)


@pytest.mark.parametrize(("name", "pack"), PACKED.items())
def test_json_lines_give_their_field(tmp_path, name, pack):
    rows = [{"text": "é\n😀", "id": 1}, {"text": ""}, {"text": None}, {"id": 2, "text": "b"}]
    content = "\n\n".join(json.dumps(row, ensure_ascii=row.get("id") == 1) for row in rows)
    write(tmp_path, {name.replace("txt", "jsonl"): pack(content.encode()), "readme.txt": "no"})
    assert texts(json_lines(tmp_path)) == ["é\n😀".encode(), b"b"]


def test_another_field_can_be_named(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "t", "body": "b"}\n'})
    assert texts(json_lines(tmp_path, field="body")) == [b"b"]


def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "a\\ud83d"}'})
    assert texts(json_lines(tmp_path)) == [b"a?"]


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', '{"other": "x"}', '{"text": 3}', "word"])
def test_a_line_without_the_field_is_shown_with_its_file(tmp_path, line):
    write(tmp_path, {"a.jsonl": f'{{"text": "x"}}\n{line}\n'})
    quoted = re.escape(repr(line.encode()))
    place = rf"a\.jsonl of the corpus, line 2: {quoted} is not"
    with pytest.raises(UserError, match=rf"{place}.*name another data\.source\.field"):
        texts(json_lines(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pack"), PACKED.items())
def test_the_number_of_a_wrong_line_is_that_of_an_editor(tmp_path, name, pack):
    lines = [f'{{"text": "{number}"}}'.encode() for number in range(300_000)]  # several blocks
    lines[250_000] = b'{"text": "a" "b\xe9"}'
    lines[7] = lines[9] = b""
    content = b"\xef\xbb\xbf" + b"\r\n".join(lines)
    write(tmp_path, {name.replace("txt", "jsonl"): pack(content)})
    with pytest.raises(UserError, match=r", line 250,001: .* \(Expecting ',' delimiter, at charac"):
        texts(json_lines(tmp_path))


def test_an_array_of_objects_is_answered_with_the_command_that_writes_lines(tmp_path):
    write(tmp_path, {"a.json": '[\n{"text": "x"},\n{"text": "y"}\n]\n'})
    path, lines = tmp_path / "a.json", tmp_path / "a.lines.jsonl"
    remedy = rf"jq -c '\.\[\]' {path} > {lines}, then set data\.source\.path={lines}$"
    with pytest.raises(UserError, match=remedy):
        texts(json_lines(tmp_path))


def test_objects_are_divided_by_their_text(tmp_path):
    rows = [{"id": number, "text": f"row {number}"} for number in range(300)]
    write(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, rows))})
    (block,) = json_lines(tmp_path, val_fraction=0.2, test_fraction=0.2).blocks(Position())
    assert len(block.texts) == 300
    assert block.splits == splits_of_texts(block.texts, 0.2, 0.2)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that writes a library of these files and returns its source."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(tmp_path)}[name])

    def write(files=(), **settings):
        for name, content in dict(files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return StandardLibrary(**settings)

    return write


def test_documents_of_the_library_come_sorted_by_relative_path(library):
    files = {"b.py": b"B", "a/z.py": b"Z", "a.py": b"A", "a/b.py": b""}
    source = library(files)
    names = [file.name for file in source.files]
    assert names == ["a.py", "a/b.py", "a/z.py", "b.py"]
    assert documents(source) == [(files[name], split_of_name(name, 0.02, 0)) for name in names]


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
def test_files_outside_the_library_are_left_out(library, left_out):
    source = library({left_out: b"x", "kept.py": b"y"})
    assert [file.name for file in source.files] == ["kept.py"]


def test_an_empty_library_is_rejected_with_a_remedy(library, tmp_path):
    with pytest.raises(UserError, match="data=stdlib.*" + re.escape(str(tmp_path)) + ".*data=text"):
        library().identity()


def test_identity_of_the_library_changes_with_names_and_content_only(library):
    before = library({"a.py": b"12"}).identity()
    assert library({"a.py": b"12"}).identity() == before
    other = library({"a.py": b"34"}).identity()
    assert other != before
    assert library({"a.py": b"12", "b.py": b""}).identity() not in (before, other)


@pytest.mark.parametrize("test_fraction", [0.0, 0.2])
def test_the_library_at_hand_is_found_and_split_by_name(test_fraction):
    source = StandardLibrary(val_fraction=0.1, test_fraction=test_fraction)
    names = [file.name for file in source.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    splits = [split for _, split in documents(source)]
    assert splits == [split_of_name(name, 0.1, test_fraction) for name in names]
    assert source.size == sum(file.size for file in source.files)


def test_libraries_that_not_everyone_has_are_imported_when_used():
    code = """import sys, lockstep.configs, lockstep.launch, pathlib
from hydra.utils import get_class
from omegaconf import OmegaConf
for path in pathlib.Path(lockstep.configs.__file__).parent.glob("source/*.yaml"):
    get_class(OmegaConf.load(path)._target_)
print({"torch", "tokenizers", "datasets", "pyarrow", "zstandard", "fsspec"} & {*sys.modules})"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
