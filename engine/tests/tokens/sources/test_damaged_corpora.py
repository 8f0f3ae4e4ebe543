"""Whatever is wrong with a corpus ends in one line that names the file, or is read."""

import contextlib
import gzip
import json
import os
import random
import shutil
import socket
import subprocess
import sys

import pytest
import zstandard

from lockstep.errors import UserError
from lockstep.tokens.sources.source import Position
from lockstep.tokens.sources.text import JsonLines, Text

ROWS = b"".join(b'{"text": "row %d of some text"}\n' % number for number in range(40))
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
# Lists corpora as a user whom permissions bind, and prints one line for each.
LIST = """
import sys
from lockstep.tokens.sources.text import Text
from lockstep.errors import UserError
for path in sys.argv[1:]:
    try:
        print([file.name for file in Text(path=path).files])
    except UserError as error:
        print(error)
"""


def texts(source):
    return [text for block in source.blocks(Position()) for text in block.texts]


def fault_of(source):
    """Return the line that reading ends with; None: it succeeds."""
    try:
        texts(source)
    except UserError as error:
        return str(error)
    return None


@pytest.fixture
def folder(tmp_path):
    """A corpus of two files, one in a subfolder."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "sub" / "b.txt").write_text("two")
    return folder


@pytest.fixture
def outside(tmp_path):
    """A folder that isn't in the corpus."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "c.txt").write_text("three")
    return tmp_path / "outside"


PATTERNS = ["", "/**", "/*/*.txt"]


def paths_in(folder, pattern):
    files = Text(path=f"{folder}{pattern}").files
    return [os.path.relpath(file.path, folder) for file in files]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_links_to_files_and_folders_are_followed(folder, outside, pattern):
    (folder / "sub" / "linked.txt").symlink_to(outside / "c.txt")
    (folder / "linked").symlink_to(outside)
    found = [path for path in paths_in(folder, pattern) if path != "a.txt"]
    assert found == ["linked/c.txt", "sub/b.txt", "sub/linked.txt"]
    lines = texts(Text(path=f"{folder}{pattern}", documents="line"))
    assert lines.count(b"three") == 2


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_link_that_leads_nowhere_is_named(folder, tmp_path, pattern):
    link = folder / "sub" / "gone.txt"
    link.symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=rf"{link} of the corpus is a link to {tmp_path}/unmounted"):
        paths_in(folder, pattern)


def test_a_link_that_leads_nowhere_is_named_whatever_it_may_have_been(folder):
    (folder / "more").symlink_to(folder / "unmounted")
    with pytest.raises(UserError, match=r"more of the corpus is a link to .*unmounted, which"):
        _ = JsonLines(path=str(folder)).files
    (folder / "more").rename(folder / ".more")
    with pytest.raises(UserError, match=r"has 2 files, .* but none matches"):
        _ = JsonLines(path=str(folder)).files


@pytest.mark.parametrize("pattern", ["", "/**"])
def test_links_without_an_end_are_named(folder, outside, pattern):
    (folder / "sub" / "out").symlink_to(outside)
    (outside / "back").symlink_to(folder)
    line = r"sub/out/back of the corpus is a link to .*/texts, which contains it, so it has no end"
    with pytest.raises(UserError, match=line):
        paths_in(folder, pattern)
    assert paths_in(folder, "/*/*.txt") == ["sub/b.txt"]


def make_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)  # a socket's name may have about 100 bytes


@pytest.mark.parametrize("pattern", ["", "/sub/*", "/sub/x.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, make_socket])
def test_a_fifo_or_a_socket_is_named_not_waited_for(folder, make, pattern):
    make(folder / "sub" / "x.jsonl")
    with pytest.raises(UserError, match=r"x\.jsonl of the corpus is not a file, but a FIFO"):
        paths_in(folder, pattern)


def test_what_is_no_part_of_a_corpus_may_be_anything(folder):
    (folder / "a.jsonl").write_bytes(ROWS)
    os.mkfifo(folder / "other")
    (folder / ".hidden").symlink_to("nowhere")
    assert len(texts(JsonLines(path=str(folder)))) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="needs setpriv")
def test_folders_and_files_that_may_not_be_read_are_named(folder):
    words = [sys.executable, "-c", LIST]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv")
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    (folder / "private").mkdir(mode=0)
    (folder / ".hidden").mkdir(mode=0)
    patterns = ["", "/**", "/*/*.txt", "/s*/*.txt", "/*.txt", "/sub"]
    paths = [f"{folder}{pattern}" for pattern in patterns]
    result = subprocess.run([*words, *paths], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"setpriv may not do this here: {result.stderr[-200:]}")
    lines = result.stdout.splitlines()
    for path, line in zip(paths[:3], lines, strict=False):
        assert line.startswith(f"data.source.path={path} cannot be read: {folder}/")
        assert "Permission denied" in line
    assert lines[3:] == ["['sub/b.txt']", "['a.txt']", "['b.txt']"]
    (folder / "private").rmdir()
    (folder / ".hidden").rmdir()


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize(("source", "name"), [(Text, "a.txt"), (JsonLines, "a.jsonl")])
def test_a_damaged_file_is_read_or_named_in_one_line(tmp_path, source, name, packing):
    path = tmp_path / (name + packing)
    content = PACKERS[packing](ROWS)
    for seed in range(60):
        draw = random.Random(seed)
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 8])):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        end = draw.choice([len(damaged), len(damaged), draw.randrange(1, len(damaged))])
        path.write_bytes(damaged[:end])
        line = fault_of(source(path=str(path)))
        assert line is None or (str(path) in line and "\n" not in line)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize(("source", "name"), [(Text, "a.txt"), (JsonLines, "a.jsonl")])
def test_a_file_in_an_encoding_of_wide_units_is_named(tmp_path, source, name, encoding):
    (tmp_path / name).write_bytes(ROWS.decode().encode(encoding))
    with pytest.raises(UserError, match=rf"{name} is not text: it has NUL bytes.*as UTF-8"):
        texts(source(path=str(tmp_path)))


def test_a_byte_order_mark_is_no_part_of_json_lines(tmp_path):
    marked = b"\xef\xbb\xbf" + ROWS
    (tmp_path / "a.jsonl").write_bytes(marked + marked)  # as `cat` joins two files
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf")
    found = texts(JsonLines(path=str(tmp_path)))
    (tmp_path / "a.jsonl").write_bytes(ROWS + ROWS)
    assert found == texts(JsonLines(path=str(tmp_path)))


@pytest.mark.parametrize("value", ["0", "false", "[]", "{}", "1", "true", '["text"]'])
def test_a_value_that_is_no_text_is_not_dropped(tmp_path, value):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{{"text": {value}}}\n')
    with pytest.raises(UserError, match=r"a\.jsonl of the corpus, line 2: .*not a JSON object"):
        texts(JsonLines(path=str(tmp_path)))


def test_json_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000)
    with pytest.raises(UserError, match=r"a\.jsonl of the corpus, line 1: b'\{\"text\": \["):
        texts(JsonLines(path=str(tmp_path)))


def test_a_nul_in_a_text_is_named_unless_the_tokenizer_has_it(tmp_path):
    rows = [{"text": "good"}, {"text": "bad\0text"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = r"a\.jsonl of the corpus has a text with a NUL byte.*remove it from b'bad\\x00text'"
    with pytest.raises(UserError, match=line):
        texts(JsonLines(path=str(tmp_path)))
    assert texts(JsonLines(path=str(tmp_path), tokenizer="gpt2")) == [b"good", b"bad\0text"]
