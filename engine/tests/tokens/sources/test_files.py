"""Which split each document in files is in, and files of a server that is slow, or fails."""

import gzip
import io
import json
import random
import sys
import uuid
from collections import Counter

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources import file_documents as module
from lockstep.tokens.sources import files
from lockstep.tokens.sources.files import open_remote
from lockstep.tokens.sources.source import Position, split_of_name, splits_of_texts
from lockstep.tokens.sources.tables import ParquetFiles
from lockstep.tokens.sources.text import JsonLines, Text

TEXT = "to be or not to be, that is the question " * 40


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def many(root, count=60):
    return write(root, {f"{number:03}.txt": f"text {number}\nmore" for number in range(count)})


def documents(source, start=None):
    blocks = source.blocks(start or Position())
    return [pair for block in blocks for pair in zip(block.texts, block.splits, strict=True)]


def by_split(source):
    texts_of = {"train": [], "val": [], "test": []}
    for text, split in documents(source):
        texts_of[split].append(text)
    return texts_of


FORMS = ("file", "line")
SHARES = {"val_fraction": 0.25, "test_fraction": 0.25}


@pytest.mark.parametrize("form", FORMS)
def test_each_document_is_in_exactly_one_of_three_splits(tmp_path, form):
    many(tmp_path)
    texts_of = by_split(Text(path=str(tmp_path), documents=form, **SHARES))
    expected = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    if form == "line":
        expected = [line for text in expected for line in text.split(b"\n")]
    assert Counter(text for texts in texts_of.values() for text in texts) == Counter(expected)
    assert all(texts_of.values())
    together = [{*texts} for texts in texts_of.values()]
    assert not any(one & other for one in together for other in together if one is not other)


def test_many_files_are_tested_on_whole_by_their_names(tmp_path):
    many(tmp_path)
    source = Text(path=str(tmp_path), **SHARES)
    assert source.by_name
    expected = [split_of_name(file.name, 0.25, 0.25) for file in source.files]
    assert [split for _, split in documents(source)] == expected


@pytest.mark.parametrize("size", [1, 2, 5, 7, 20, 1000])
def test_parts_of_a_file_are_its_text_in_three_splits(tmp_path, size):
    text = TEXT[:size]
    write(tmp_path, {"a.txt": text})
    source = Text(path=str(tmp_path), **SHARES)
    parts = {split: part for part, split in documents(source)}
    assert [*parts] == ["train", "test", "val"]
    # The end is validated on, as without a test split.
    assert b"".join(parts[split] for split in ("train", "val", "test")) == text.encode()
    if size == 1000:
        assert [len(part) for part in parts.values()] == pytest.approx([500, 250, 250], abs=10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 60])
def test_without_a_test_fraction_the_splits_are_as_before(tmp_path, form, count):
    many(tmp_path, count)
    write(tmp_path, {"long.txt": TEXT})
    settings = {"path": str(tmp_path), "documents": form, "val_fraction": 0.25}
    pairs = documents(Text(**settings, test_fraction=0.0))
    assert pairs == documents(Text(**settings))
    assert {split for _, split in pairs} == {"train", "val"}
    if form == "line":
        texts = [text for text, _ in pairs]
        assert [split for _, split in pairs] == splits_of_texts(texts, 0.25, 0)


@pytest.mark.parametrize(
    ("settings", "splits"),
    [
        ({}, ["train", "val"]),
        ({"test_fraction": 0.25}, ["train", "val", "test"]),
        ({"test_path": "held"}, ["train", "val", "test"]),
        ({"val_path": "held"}, ["train", "val"]),
    ],
)
def test_there_is_a_test_split_only_if_asked_for(tmp_path, settings, splits):
    many(tmp_path / "texts")
    write(tmp_path, {"held/x.txt": "held out"})
    settings = {k: str(tmp_path / v) if k.endswith("path") else v for k, v in settings.items()}
    config = Text(root=str(tmp_path / "data"), path=str(tmp_path / "texts"), **settings)
    config.val_fraction = 0.25
    folder = prepare(config)
    index = load_index(folder)
    assert [*index.splits] == splits
    assert config.has_test == ("test" in splits)
    held = {"test_path": "test", "val_path": "val"}.get(next(iter(settings), ""))
    if held:
        assert open_split(folder, held).tobytes() == b"held out\0"


@pytest.mark.parametrize("form", FORMS)
def test_with_a_val_path_all_of_path_is_trained_on(tmp_path, form):
    many(tmp_path / "texts", 60)
    many(tmp_path / "few", 2)
    write(tmp_path, {"held/x.txt": "held out\nlines"})
    for folder in ("texts", "few"):
        config = Text(
            path=str(tmp_path / folder),
            val_path=str(tmp_path / "held"),
            val_fraction=0.3,
            documents=form,
        )
        texts_of = by_split(config)
        content = b"".join(path.read_bytes() for path in sorted((tmp_path / folder).iterdir()))
        assert b"".join(texts_of["train"]) == content.replace(
            b"\n", b"" if form == "line" else b"\n"
        )
        held = [b"held out", b"lines"] if form == "line" else [b"held out\nlines"]
        assert (texts_of["val"], texts_of["test"]) == (held, [])


def test_a_test_path_leaves_the_division_for_validation_as_it_is(tmp_path):
    many(tmp_path / "texts")
    write(tmp_path, {"held/x.txt": "held out"})
    settings = {"path": str(tmp_path / "texts"), "val_fraction": 0.25}
    before = by_split(Text(**settings))
    after = by_split(Text(**settings, test_path=str(tmp_path / "held"), test_fraction=0.3))
    assert after == {**before, "test": [b"held out"]}


def test_a_long_held_out_file_is_whole_in_its_split(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 300)
    write(tmp_path, {"a.txt": TEXT, "held/x.txt": TEXT.upper()})
    paths = {"path": str(tmp_path / "a.txt"), "val_path": str(tmp_path / "held")}
    texts_of = by_split(Text(**paths))
    assert len(texts_of["val"]) > 5
    assert b"".join(texts_of["val"]) == TEXT.upper().encode()
    assert b"".join(texts_of["train"]) == TEXT.encode()


def test_reading_resumes_at_any_block_of_any_path(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 50)
    for name in ("texts", "val", "test"):
        many(tmp_path / name, 20)
    paths = {"val_path": str(tmp_path / "val"), "test_path": str(tmp_path / "test")}
    source = Text(path=str(tmp_path / "texts"), **paths)
    all_blocks = [*source.blocks(Position())]
    assert {split for block in all_blocks for split in block.splits} == {"train", "val", "test"}
    assert len(all_blocks) > 9
    for number, block in enumerate(all_blocks[:-1]):
        assert [*source.blocks(block.after)] == all_blocks[number + 1 :]


def test_a_path_on_a_server_and_one_here_are_read_together(tmp_path):
    url = f"memory://{uuid.uuid4()}"
    fsspec.filesystem("memory").pipe(f"{url}/a.txt.gz", gzip.compress(b"far"))
    write(tmp_path, {"x.txt": "near"})
    far_and_near = Text(path=url, val_path=str(tmp_path), test_path=f"{url}/a.txt.gz")
    assert by_split(far_and_near) == {"train": [b"far"], "val": [b"near"], "test": [b"far"]}


@pytest.mark.parametrize("door", ["path", "val_path", "test_path"])
def test_each_path_decides_the_tokens(tmp_path, door):
    paths = {name: str(many(tmp_path / name, 20)) for name in ("path", "val_path", "test_path")}
    before = Text(**paths).identity()
    assert Text(**paths).identity() == before
    write(tmp_path / door, {"more.txt": "more"})
    assert Text(**paths).identity() != before


@pytest.mark.parametrize("door", ["path", "val_path", "test_path"])
@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "nothing/*.txt",
            r"data\.source\.{}=nothing/\*\.txt matches no file; give a file, folder or glob",
        ),
        ("", r"data\.source\.{} is empty; set it to a file, a folder, a glob, or a URL"),
        ("zz://a", r"data\.source\.{}=zz://a cannot be read: .*zz"),
    ],
)
def test_a_path_that_is_wrong_is_one_clear_line_with_its_setting(tmp_path, door, value, line):
    with pytest.raises(UserError, match=line.format(door)) as caught:
        Text(**{"path": str(many(tmp_path)), door: value}).identity()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        (ParquetFiles, "a.txt", "set data=text, which reads *.txt"),
        (JsonLines, "a.parquet", "set data=parquet, which reads *.parquet"),
        (JsonLines, "a.xyz", "give another folder, or a glob that names the files"),
    ],
)
def test_a_folder_of_another_kind_is_answered_with_what_it_has(tmp_path, kind, name, remedy):
    write(tmp_path, {name: "text"})
    with pytest.raises(UserError) as caught:
        kind(path=str(tmp_path)).identity()
    start = f"data.source.path={tmp_path} has 1 file, such as {tmp_path / name}, but none matches "
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(remedy)


def test_files_with_a_split_of_their_own_do_not_make_few_files_many(tmp_path):
    write(tmp_path, {"a.txt": TEXT})
    many(tmp_path / "held")
    source = Text(path=str(tmp_path / "a.txt"), test_path=str(tmp_path / "held"), val_fraction=0.2)
    texts_of = by_split(source)
    assert (len(texts_of["train"]), len(texts_of["val"]), len(texts_of["test"])) == (1, 1, 60)
    assert source.held_out == module.ENDS


def test_a_small_test_fraction_of_few_files_is_not_lost(tmp_path):
    many(tmp_path)
    source = Text(path=str(tmp_path), val_fraction=0.3, test_fraction=0.01)
    assert by_split(source)["test"]


LINES = [f"row {number} " + random.Random(number).randbytes(20).hex() for number in range(3000)]


def texts(source):
    return [text.decode() for block in source.blocks(Position()) for text in block.texts]


def write_text(folder):
    (folder / "a.txt").write_text("\n".join(LINES))
    return Text(documents="line"), "a.txt"


def write_json(folder):
    lines = "".join(json.dumps({"text": word}) + "\n" for word in LINES)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return JsonLines(), "a.jsonl.gz"


def write_zst(folder):
    lines = "".join(json.dumps({"text": word}) + "\n" for word in LINES)
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    return JsonLines(), "a.jsonl.zst"


def write_parquet(folder):
    pq.write_table(pa.table({"text": LINES}), folder / "a.parquet", row_group_size=1000)
    return ParquetFiles(), "a.parquet"


WRITERS = (write_text, write_json, write_zst, write_parquet)


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_is_read_through_cuts_and_failures(serving, tmp_path, writer, parts):
    source, name = writer(tmp_path)
    with serving(tmp_path, parts=parts) as (url, faults):
        source.path = f"{url}/{name}"
        assert source.files[0].size == (tmp_path / name).stat().st_size
        faults.cuts = [100, 0, 30_000]
        faults.failures = int(parts)  # fsspec leaves the connection of a failed stream open
        assert texts(source) == LINES
        assert not faults.cuts
        assert not faults.failures


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_of_a_server_has_its_files_and_their_sizes(serving, tmp_path, writer):
    source, name = writer(tmp_path)
    with serving(tmp_path) as (url, _):
        source.path = f"{url}/"
        (file,) = source.files
        assert (file.name, file.size) == (name, (tmp_path / name).stat().st_size)
        assert texts(source) == LINES


def test_a_link_that_is_cut_again_and_again_is_one_clear_line(serving, tmp_path):
    source, name = write_text(tmp_path)
    with serving(tmp_path) as (url, faults):
        source.path = f"{url}/{name}"
        assert source.files
        faults.cuts = [0] * 50
        with pytest.raises(UserError, match=rf"{name} cannot be read: .*; fix it") as caught:
            texts(source)
    assert "\n" not in str(caught.value)
    assert len(faults.cuts) == 50 - files.TRIES


def test_a_file_that_is_missing_is_one_clear_line(serving, tmp_path):
    source, name = write_text(tmp_path)
    with serving(tmp_path) as (url, _):
        source.path = f"{url}/none.txt"
        with pytest.raises(UserError, match=r"none\.txt cannot be read: 404"):
            texts(source)
        source.path = f"{url}/*.json"
        with pytest.raises(UserError, match=r"\*\.json matches no file"):
            source.identity()
        source = Text(path=f"{url}/{name}")
        assert source.files
        (tmp_path / name).unlink()
        with pytest.raises(UserError, match=r"a\.txt cannot be read: ") as caught:
            texts(source)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_not_called_an_empty_one():
    with pytest.raises(UserError, match=r"x\.txt cannot be read: .*[Cc]onnect"):
        Text(path="http://127.0.0.1:9/x.txt").identity()


def test_a_slow_server_is_waited_for(serving, tmp_path):
    source, name = write_text(tmp_path)
    with serving(tmp_path, pause=0.2) as (url, _):
        source.path = f"{url}/{name}"
        assert texts(source) == LINES


def test_a_wrong_column_is_one_clear_line(serving, tmp_path):
    source, name = write_parquet(tmp_path)
    with serving(tmp_path) as (url, _):
        source.path, source.column = f"{url}/{name}", "body"
        with pytest.raises(
            UserError, match=r"lacks the column data\.source\.column=body; it has text"
        ):
            texts(source)


@pytest.mark.parametrize(
    ("url", "module", "library"),
    [("s3://b/a.txt", "s3fs", "s3fs"), ("hf://datasets/a/b", "huggingface_hub", "huggingface_hub")],
)
def test_a_protocol_without_its_library_is_one_line_with_the_command(
    monkeypatch, url, module, library
):
    monkeypatch.setitem(sys.modules, module, None)
    registry = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(registry, url.partition(":")[0], raising=False)
    line = (
        rf"data\.source\.path={url} needs {library}, which is not installed; run: .*pip install .*"
    )
    with pytest.raises(UserError, match=line + library) as caught:
        Text(path=url).identity()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parts", [True, False])
def test_any_reads_and_seeks_give_the_bytes_of_the_file(serving, tmp_path, parts):
    content = random.Random(0).randbytes(50_000)
    (tmp_path / "a.bin").write_bytes(content)
    chance = random.Random(1)
    with serving(tmp_path, parts=parts) as (url, faults):
        there = open_remote(fsspec.filesystem("http"), f"{url}/a.bin")
        here = io.BytesIO(content)
        for _ in range(40):
            if parts:
                faults.cuts = [chance.randrange(200)]
            whence = chance.choice([io.SEEK_SET, io.SEEK_END])
            place = chance.randrange(50_000) if whence == io.SEEK_SET else -chance.randrange(50_000)
            assert there.seek(place, whence) == here.seek(place, whence)
            size = chance.choice([0, 1, 700, 30_000])
            assert there.read(size) == here.read(size)
        assert there.seek(0) == 0
        assert there.read() == content
        there.close()
