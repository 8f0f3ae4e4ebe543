"""A folder of texts may have other files, which are left out and named once."""

import codecs
import gzip
import hashlib
import random
import tarfile
import uuid

import fsspec
import pytest

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.shards import load_index
from lockstep.tokens.sources import files
from lockstep.tokens.sources.source import Position
from lockstep.tokens.sources.text import JsonLines, Text

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + random.Random(0).randbytes(3000)
TEXT = b"some words of a text\n" * 20


@pytest.fixture(autouse=True)
def say_again():
    files._warn.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """Three texts, of which one is packed, and one is in a subfolder."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.md").write_bytes(TEXT)
    (folder / "b.txt.gz").write_bytes(gzip.compress(TEXT))
    (folder / "sub" / "c.md").write_bytes(TEXT)
    return folder


def texts(source):
    """Return all of a corpus; the ends of few files are documents of their own."""
    return b"".join(text for block in source.blocks(Position()) for text in block.texts)


def add_image(folder):
    (folder / "x.PNG").write_bytes(PNG)
    return "x.PNG"


def add_compiled(folder):
    (folder / "sub" / "__pycache__").mkdir()
    (folder / "sub" / "__pycache__" / "a.cpython-311.pyc").write_bytes(PNG)
    return "sub/__pycache__/a.cpython-311.pyc"


def add_pdf(folder):
    (folder / "a.pdf").write_bytes(b"%PDF-1.4\nwithout NUL bytes")
    return "a.pdf"


def add_archive(folder):
    with tarfile.open(folder / "0.tar.gz", "w:gz") as archive:
        archive.add(folder / "a.md")
    return "0.tar.gz"


def add_packed(folder):
    (folder / "z.gz").write_bytes(gzip.compress(PNG))
    return "z.gz"


def add_unknown(folder):
    (folder / "sub" / "data").write_bytes(PNG)
    return "sub/data"


def add_thumbs(folder):
    (folder / "Thumbs.db").write_bytes(PNG)
    return "Thumbs.db"


OTHERS = [add_image, add_compiled, add_pdf, add_archive, add_packed, add_unknown, add_thumbs]


@pytest.mark.parametrize("pattern", ["", "/", "/**"])
@pytest.mark.parametrize("add", OTHERS)
def test_a_file_that_is_no_text_is_left_out_and_named_once(folder, caplog, add, pattern):
    expected = texts(Text(path=f"{folder}{pattern}"))
    name = add(folder)
    assert texts(Text(path=f"{folder}{pattern}")) == expected == TEXT * 3
    assert texts(Text(path=f"{folder}{pattern}")) == expected
    (line,) = caplog.messages
    assert line == (
        f"data.source.path={folder}{pattern}: 1 file is not text, and is left out: {name}; to "
        f"choose files, give a glob, as data.source.path='{folder}/**/*.md'"
    )


def test_the_glob_of_the_line_chooses_as_it_says(folder, caplog):
    for add in OTHERS:
        add(folder)
    assert texts(Text(path=str(folder))) == TEXT * 3
    (line,) = caplog.messages
    assert ": 7 files are not text, and are left out: 0.tar.gz, a.pdf, sub/__pycache__/" in line
    assert ", ...; to choose files, give a glob, as data.source.path=" in line
    caplog.clear()
    assert texts(Text(path=f"{folder}/**/*.md")) == TEXT * 2
    assert not caplog.messages


@pytest.mark.parametrize("add", [add_image, add_pdf, add_compiled, add_archive])
def test_what_is_left_out_by_its_name_changes_no_fingerprint(folder, add):
    before = recipe_of(Text(path=str(folder))).fingerprint
    add(folder)
    assert recipe_of(Text(path=str(folder))).fingerprint == before


def test_the_identity_of_a_folder_of_texts_is_that_of_its_files(folder):
    for name in ("README", "x.unknown", "y.dat", "z.PY"):
        (folder / name).write_bytes(TEXT)
    names = ["README", "a.md", "b.txt.gz", "sub/c.md", "x.unknown", "y.dat", "z.PY"]
    expected = [[name, hashlib.sha256((folder / name).read_bytes()).hexdigest()] for name in names]
    assert Text(path=str(folder)).identity() == expected


def test_a_build_with_files_that_are_left_out_is_one_of_the_texts(folder, tmp_path, caplog):
    expected = prepare(Text(path=str(folder), root=str(tmp_path / "a"), val_fraction=0.3))
    for add in OTHERS:
        add(folder)
    made = prepare(Text(path=str(folder), root=str(tmp_path / "b"), val_fraction=0.3))
    for name in ("train-00000.bin", "val-00000.bin"):
        assert (made / name).read_bytes() == (expected / name).read_bytes()
    assert load_index(made).invalid_documents == 0
    assert len(caplog.messages) == 1
    again = Text(path=str(folder), root=str(tmp_path / "b"), val_fraction=0.3)
    assert prepare(again) == made
    assert len(caplog.messages) == 1


def test_reading_resumes_at_any_block_beside_files_that_are_left_out(folder, monkeypatch):
    from lockstep.tokens.sources import file_documents

    monkeypatch.setattr(file_documents, "BLOCK", 10)
    for add in OTHERS:
        add(folder)
    source = Text(path=str(folder))
    blocks = [*source.blocks(Position())]
    assert len(blocks) == 4
    for number, block in enumerate(blocks[:-1]):
        assert [*Text(path=str(folder)).blocks(block.after)] == blocks[number + 1 :]


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["a.png", "b/c.png"], "or, if these are texts, name them: data.source.path='{}/**/*.png'"),
        (["a.parquet"], "set data=parquet, which reads *.parquet"),
        (["tokens.bin"], "set data=shards, which reads *.bin"),
        (["a", "b"], "give a folder with texts"),
    ],
)
@pytest.mark.parametrize("pattern", ["", "/**"])
def test_a_folder_without_a_text_is_refused_with_what_helps(tmp_path, names, remedy, pattern):
    folder = tmp_path / "texts"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PNG)
    with pytest.raises(UserError) as caught:
        prepare(Text(path=f"{folder}{pattern}", root=str(tmp_path / "data")))
    line = str(caught.value)
    files = f"{len(names)} file{'s' * (len(names) > 1)}"
    start = f"data.source.path={folder}{pattern} has {files}, but no text: {', '.join(names)}; "
    assert line.startswith(start)
    assert line.endswith(remedy.format(folder))
    assert not [*tmp_path.glob("data/text-*")]


def test_a_text_with_the_name_of_another_kind_is_read_as_before(folder):
    (folder / "x.png").write_bytes(TEXT)
    (folder / "x.so").write_bytes(TEXT[:1] + "ü".encode() * files.START)
    assert "x.so" in [file.name for file in Text(path=str(folder)).files]
    (folder / "x.so").unlink()
    assert texts(Text(path=str(folder))) == TEXT * 4
    assert texts(Text(path=f"{folder}/**/*.png")) == TEXT


@pytest.mark.parametrize("name", ["b.txt", "b.md", "b.PY", "b.csv", "b.txt.gz"])
def test_a_text_by_its_name_is_not_left_out(folder, name):
    content = gzip.compress(PNG) if name.endswith(".gz") else PNG
    (folder / name).write_bytes(content)
    line = rf"{name} is not text: it has NUL bytes; save it as UTF-8, or name the texts alone"
    with pytest.raises(UserError, match=line):
        texts(Text(path=str(folder)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", ["some words\r\n", "деревья\n", "日本語 words\n", "🌲 trees\n"])
def test_a_text_in_another_encoding_is_not_left_out(folder, encoding, text):
    content = (text * 500).encode(encoding)
    (folder / "notes").write_bytes(content)
    with pytest.raises(UserError, match=r"notes is not text: it has NUL bytes; save it as UTF-8"):
        texts(Text(path=str(folder)))


def test_a_bom_is_that_of_a_text(folder):
    (folder / "notes").write_bytes(codecs.BOM_UTF16_LE + "words".encode("utf-16-le"))
    with pytest.raises(UserError, match=r"notes is not text"):
        texts(Text(path=str(folder)))


def test_each_path_has_its_own_line(folder, tmp_path, caplog):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "v.txt").write_bytes(TEXT)
    add_image(folder)
    add_image(tmp_path / "val")
    texts(Text(path=str(folder), val_path=str(tmp_path / "val")))
    starts = [line.partition(":")[0] for line in caplog.messages]
    assert starts == [f"data.source.path={folder}", f"data.source.val_path={tmp_path / 'val'}"]


def test_a_server_s_folder_leaves_out_the_same(folder, caplog):
    add_image(folder)
    add_packed(folder)
    root = f"/{uuid.uuid4()}"
    system = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    assert texts(Text(path=f"memory:/{root}")) == TEXT * 3
    assert "2 files are not text, and are left out: x.PNG, z.gz; " in caplog.text


def test_a_source_that_looks_for_its_own_files_says_nothing_of_others(folder, caplog):
    (folder / "a.jsonl").write_text('{"text": "words"}\n')
    add_image(folder)
    assert texts(JsonLines(path=str(folder))) == b"words"
    assert not caplog.messages


def test_the_command_prepares_a_folder_with_an_image(command, folder, tmp_path):
    add_image(folder)
    words = ["prepare", "data=text", f"data.source.path={folder}", "data.source.val_fraction=0.2"]
    words += [f"data.root={tmp_path / 'data'}", "model.block_size=16"]
    lines = command(*words).stdout.splitlines()
    assert lines[0].startswith(f"data.source.path={folder}: 1 file is not text, and is left out")
    assert lines[1].startswith("prepared text: 3 documents")
    assert [line.partition(":")[0] for line in command(*words).stdout.splitlines()] == [
        "found text"
    ]
