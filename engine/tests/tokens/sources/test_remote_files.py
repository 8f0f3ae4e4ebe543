"""Files of a server that cuts connections, fails, or is slow; and protocols without a library."""

import gzip
import io
import json
import random
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lockstep.errors import UserError
from lockstep.tokens.sources import remote_files
from lockstep.tokens.sources.jsonl import JsonLines
from lockstep.tokens.sources.parquet import ParquetFiles
from lockstep.tokens.sources.remote_files import open_remote
from lockstep.tokens.sources.source import Position
from lockstep.tokens.sources.text import Text

WORDS = [f"row {number} " + random.Random(number).randbytes(20).hex() for number in range(3000)]


def texts(source):
    return [text.decode() for block in source.blocks(Position()) for text in block.texts]


def write_text(folder):
    (folder / "a.txt").write_text("\n".join(WORDS))
    return Text(documents="line"), "a.txt"


def write_json(folder):
    lines = "".join(json.dumps({"text": word}) + "\n" for word in WORDS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return JsonLines(), "a.jsonl.gz"


def write_zst(folder):
    lines = "".join(json.dumps({"text": word}) + "\n" for word in WORDS)
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    return JsonLines(), "a.jsonl.zst"


def write_parquet(folder):
    pq.write_table(pa.table({"text": WORDS}), folder / "a.parquet", row_group_size=1000)
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
        assert texts(source) == WORDS
        assert not faults.cuts
        assert not faults.failures


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_of_a_server_has_its_files_and_their_sizes(serving, tmp_path, writer):
    source, name = writer(tmp_path)
    with serving(tmp_path) as (url, _):
        source.path = f"{url}/"
        (file,) = source.files
        assert (file.name, file.size) == (name, (tmp_path / name).stat().st_size)
        assert texts(source) == WORDS


def test_a_link_that_is_cut_again_and_again_is_one_clear_line(serving, tmp_path):
    source, name = write_text(tmp_path)
    with serving(tmp_path) as (url, faults):
        source.path = f"{url}/{name}"
        assert source.files
        faults.cuts = [0] * 50
        with pytest.raises(UserError, match=rf"{name} cannot be read: .*; fix it") as caught:
            texts(source)
    assert "\n" not in str(caught.value)
    assert len(faults.cuts) == 50 - remote_files.TRIES


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
        assert texts(source) == WORDS


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
