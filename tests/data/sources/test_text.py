import gzip
import json
import re
import uuid

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.config import UserError
from lockstep_gpt.data.sources import text as module
from lockstep_gpt.data.sources.source import Position
from lockstep_gpt.data.sources.stdlib import corpus_of, split_of
from lockstep_gpt.data.sources.text import (
    JsonlData,
    JsonLines,
    StdlibData,
    TextData,
)

BY_NAME = 0.49  # held out of ten or more files, enough that only their names decide


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def corpus(path, **settings):
    return corpus_of(TextData(path=str(path), **settings))


def lines(path, **settings):
    return corpus(path, documents="line", **settings)


START = Position()


def blocks(corpus, start=START):
    return list(corpus.blocks(start))


def texts(corpus):
    return [text for block in blocks(corpus) for text in block.texts]


def test_the_library_at_hand_is_found_and_split_by_name():
    found = corpus_of(StdlibData(val_fraction=0.1))
    names = [file.name for file in found.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    held = [val for block in found.blocks(START) for val in block.val]
    assert held == [split_of(name, 0.1) == "val" for name in names]


FILES = {"b.txt": "bee", "a.txt": "ay", "c/d.md": "dee", ".git/x": "no", "c/.x": "no"}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ["a.txt", "b.txt", "c/d.md"]),
        ("b.txt", ["b.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.md", ["c/d.md"]),
        ("c/.x", [".x"]),
    ],
)
def test_a_path_is_a_folder_a_file_or_a_glob(tmp_path, path, found):
    assert [file.name for file in corpus(write(tmp_path, FILES) / path).files] == found


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
    with pytest.raises(UserError, match=r"data\.path=.* matches no file; give"):
        corpus(tmp_path / path)


def test_an_unknown_protocol_is_one_clear_line():
    with pytest.raises(UserError, match=r"data\.path=zz://a cannot be read: .*zz"):
        corpus("zz://a")


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
    found = corpus(write(tmp_path, {"a.txt": "x"}))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read: No such file"):
        texts(found)


def test_lines_are_documents_with_any_line_ending(tmp_path):
    write(tmp_path, {"a": "one\r\n\r\n two \n\nthree", "b": "", "c": "\n"})
    assert texts(lines(tmp_path)) == [b"one", b" two ", b"three"]


LINES = st.lists(
    st.binary(max_size=9).filter(lambda line: not set(line) & {0, 10, 13}), max_size=30
)


@given(files=st.lists(LINES, max_size=4), size=st.integers(1, 20))
def test_lines_are_the_same_however_the_files_are_read(tmp_path_factory, files, size):
    root = tmp_path_factory.mktemp("lines")
    write(root, {f"{number}": b"\n".join(each) for number, each in enumerate(files)} | {"z": b"z"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", size)
        patch.setattr(module, "is_utf8", lambda _: True)
        expected = [line for each in files for line in each if line]
        assert texts(lines(root)) == [*expected, b"z"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_line", [False, True])
def test_reading_resumes_at_any_block(tmp_path, monkeypatch, packed, by_line):
    monkeypatch.setattr(module, "BLOCK", 50)
    monkeypatch.setattr(module, "LONGEST", 100)
    pack, ending = (gzip.compress, ".gz") if packed else (bytes, "")
    text = [" ".join(map(str, range(n, n + 99))).encode().replace(b"7 ", b"\n") for n in range(5)]
    write(tmp_path, {f"{n}{ending}": pack(each) for n, each in enumerate(text)})
    found = lines(tmp_path) if by_line else corpus(tmp_path)
    whole = blocks(found)
    assert len(whole) > 9
    for number, block in enumerate(whole):
        rest = whole[number + 1 :] or [whole[-1]._replace(texts=[], val=[])]
        for again, expected in zip(blocks(found, block.after), rest, strict=True):
            assert again[1:] == expected[1:]
            assert again.after[:2] == expected.after[:2]


def test_positions_rise_to_the_size_of_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 100)
    found = corpus(write(tmp_path, {"a": "word " * 99, "b.gz": gzip.compress(b"x" * 999)}))
    read = [block.after.read for block in found.blocks(START)]
    assert read == sorted(read)
    assert read[-1] == found.size == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_long_file_is_cut_between_words_into_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 1000)
    text = "naïve words, and more\n" * 200
    found = corpus(write(tmp_path, {f"{n}": text for n in range(30)}), val_fraction=BY_NAME)
    parts = texts(found)
    assert b"".join(parts) == 30 * text.encode()
    assert max(map(len, parts)) <= 2000
    assert all(part[-1:].isalnum() for part in parts if not text.endswith(part.decode()))


def test_many_files_are_held_out_whole_by_their_names(tmp_path):
    write(tmp_path, {f"{n}/x": f"text {n}" for n in range(40)})
    held = {}
    for block in corpus(tmp_path, val_fraction=BY_NAME).blocks(START):
        held |= zip(block.texts, block.val, strict=True)
    expected = {f"text {n}".encode(): split_of(f"{n}/x", BY_NAME) == "val" for n in range(40)}
    assert held == expected


def test_of_one_file_the_end_is_held_out(tmp_path):
    text = "to be or not to be " * 500
    (block,) = blocks(corpus(write(tmp_path, {"a": text}), val_fraction=0.1))
    assert b"".join(block.texts) == text.encode()
    assert block.val == [False, True]
    assert len(block.texts[1]) == pytest.approx(0.1 * len(text), abs=10)


def test_equal_documents_are_never_in_both_splits(tmp_path):
    documents = [f"document {n % 50}" for n in range(500)]
    found = lines(write(tmp_path, {"a": "\n".join(documents)}), val_fraction=0.5)
    split = {text: set() for text in texts(found)}
    for block in found.blocks(START):
        for text, val in zip(block.texts, block.val, strict=True):
            split[text].add(val)
    assert {tuple(each) for each in split.values()} == {(False,), (True,)}


BAD = b"caf\xe9"


@pytest.mark.parametrize("by_line", [False, True])
@pytest.mark.parametrize(("policy", "kept"), [("replace", [b"caf\xef\xbf\xbd"]), ("skip", [])])
def test_invalid_utf8_is_replaced_or_skipped_and_counted(tmp_path, by_line, policy, kept):
    files = {"a": b"x\n" + BAD} if by_line else {f"{n:02}": b"x" for n in range(30)} | {"99": BAD}
    settings = {"invalid_utf8": policy, "val_fraction": BY_NAME}
    found = (lines if by_line else corpus)(write(tmp_path, files), **settings)
    assert set(texts(found)) == {b"x", *kept}
    assert sum(block.invalid for block in found.blocks(START)) == 1


@pytest.mark.parametrize("by_line", [False, True])
def test_invalid_utf8_fails_with_the_file_s_name_if_set(tmp_path, by_line):
    found = (lines if by_line else corpus)(write(tmp_path, {"a": BAD}), invalid_utf8="fail")
    with pytest.raises(UserError, match=r"/a of the corpus is not UTF-8; .*data\.invalid_utf8"):
        texts(found)


def json_lines(root, **settings):
    return JsonLines(JsonlData(path=str(root), **settings))


@pytest.mark.parametrize(("name", "pack"), PACKED.items())
def test_json_lines_give_their_field(tmp_path, name, pack):
    rows = [{"text": "é\n\0😀", "id": 1}, {"text": ""}, {"text": None}, {"id": 2, "text": "b"}]
    content = "\n\n".join(json.dumps(row, ensure_ascii=row.get("id") == 1) for row in rows)
    write(tmp_path, {name.replace("txt", "jsonl"): pack(content.encode()), "readme.txt": "no"})
    assert texts(json_lines(tmp_path)) == ["é\n\0😀".encode(), b"b"]


def test_another_field_can_be_named(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "t", "body": "b"}\n'})
    assert texts(json_lines(tmp_path, field="body")) == [b"b"]


def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "a\\ud83d"}'})
    assert texts(json_lines(tmp_path)) == [b"a?"]


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', '{"other": "x"}', '{"text": 3}', "word"])
def test_a_line_without_the_field_is_shown_with_its_file(tmp_path, line):
    write(tmp_path, {"a.jsonl": f'{{"text": "x"}}\n{line}\n'})
    shown = re.escape(repr(line.encode()))
    with pytest.raises(
        UserError, match=rf"a\.jsonl of the corpus has the line {shown}.*field=text"
    ):
        texts(json_lines(tmp_path))
