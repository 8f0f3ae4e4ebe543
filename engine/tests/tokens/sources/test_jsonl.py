import gzip
import json
import re

import pytest
import zstandard

from lockstep.errors import UserError
from lockstep.tokens.sources.jsonl import JsonLines
from lockstep.tokens.sources.source import Position, splits_of_texts

PACKED = {"a.txt": bytes, "a.txt.gz": gzip.compress, "a.txt.zst": zstandard.compress}


def write(root, files):
    for name, content in files.items():
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def texts(source):
    return [text for block in source.blocks(Position()) for text in block.texts]


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
