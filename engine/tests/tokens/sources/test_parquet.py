import random

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources.parquet import ParquetFiles, texts_in
from lockstep.tokens.sources.source import Position, splits_of_texts

TEXTS = [f"row {number} é" for number in range(1000)]


def write(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


def settings(path, **changes):
    return ParquetFiles(path=str(path), **changes)


def blocks(config, start=None):
    return list(config.blocks(start or Position()))


def texts(config):
    return [text.decode() for block in blocks(config) for text in block.texts]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view"])
def test_rows_of_a_column_are_documents_in_order(tmp_path, kind):
    column = pyarrow.array([*TEXTS, None, ""]).cast(kind)
    write(tmp_path / "b.parquet", {"id": range(1002), "text": column}, row_group_size=300)
    write(tmp_path / "a/a.parquet", {"text": ["first"]})
    (tmp_path / "readme.md").write_text("no")
    assert texts(settings(tmp_path)) == ["first", *TEXTS]


def test_a_dictionary_of_texts_is_text(tmp_path):
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    write(tmp_path / "a.parquet", {"text": column})
    assert texts(settings(tmp_path)) == ["a", "b", "a"]


def test_another_column_can_be_named(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["t"], "body": ["b"]})
    assert texts(settings(tmp_path, column="body")) == ["b"]


def test_rows_are_held_out_by_their_text(tmp_path):
    write(tmp_path / "a.parquet", {"text": TEXTS})
    all_blocks = blocks(settings(tmp_path, val_fraction=0.3, test_fraction=0.2))
    splits = [split for block in all_blocks for split in block.splits]
    assert splits == splits_of_texts([text.encode() for text in TEXTS], 0.3, 0.2)


def test_rows_of_held_out_files_are_in_their_split(tmp_path):
    write(tmp_path / "texts/a.parquet", {"text": TEXTS})
    write(tmp_path / "val/a.parquet", {"text": ["v", "w"]})
    write(tmp_path / "test/a.parquet", {"text": ["t"]})
    paths = {"val_path": str(tmp_path / "val"), "test_path": str(tmp_path / "test")}
    all_blocks = blocks(settings(tmp_path / "texts", **paths, val_fraction=0.3))
    splits = [split for block in all_blocks for split in block.splits]
    assert splits == ["train"] * 1000 + ["val"] * 2 + ["test"]


def test_reading_resumes_at_any_block(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=300)
    write(tmp_path / "b.parquet", {"text": TEXTS[:100]})
    monkeypatch.setattr("lockstep.tokens.sources.parquet.BLOCK", 500)
    all_blocks = blocks(settings(tmp_path))
    assert len(all_blocks) > 10
    assert sum(len(block.texts) for block in all_blocks) == 1100
    for number in (0, 3, 7, len(all_blocks) - 1):
        assert blocks(settings(tmp_path), all_blocks[number].after) == all_blocks[number + 1 :]


def test_invalid_utf8_is_repaired(tmp_path):
    write(tmp_path / "a.parquet", {"text": pyarrow.array([b"caf\xe9", b"x"], "binary")})
    (block,) = blocks(settings(tmp_path))
    assert (block.texts, block.invalid) == (["caf\ufffd".encode(), b"x"], 1)


def test_a_url_is_read_like_a_local_path(tmp_path):
    write(tmp_path / "a.parquet", {"text": TEXTS})
    fsspec.filesystem("memory").put(str(tmp_path / "a.parquet"), "/far/a.parquet")
    assert texts(settings("memory://far")) == TEXTS


def test_a_missing_column_is_rejected_with_the_existing_ones(tmp_path):
    write(tmp_path / "a.parquet", {"id": [1], "body": ["b"]})
    with pytest.raises(
        UserError, match=r"lacks the column data\.source\.column=text; it has id, body"
    ):
        texts(settings(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more"])
def test_a_damaged_file_is_one_clear_line(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read: [^\n]*; fix it") as caught:
        texts(settings(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [([1, 2], "int64"), ([True], "bool"), ([["a"]], "list<.*>"), ([{"a": "b"}], "struct<.*>")],
)
def test_a_column_that_is_not_text_is_one_clear_line(tmp_path, rows, kind):
    write(tmp_path / "a.parquet", {"id": rows, "text": rows})
    column = r"the column data\.source\.column=text"
    line = rf"a\.parquet of the corpus has {kind} in {column}, not text; it has"
    with pytest.raises(UserError, match=f"{line} id, text") as caught:
        texts(settings(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_one_clear_line(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"text": TEXTS})
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"^data=parquet needs pyarrow, .+ install .*\bparquet\b"):
        texts(settings(tmp_path))


def test_a_folder_is_prepared_whole(tmp_path):
    write(tmp_path / "texts/a.parquet", {"text": TEXTS})
    config = settings(tmp_path / "texts", root=str(tmp_path / "data"), val_fraction=0.2)
    folder = prepare(config)
    splits = load_index(folder).splits
    assert sum(split.documents for split in splits.values()) == len(TEXTS)
    tokens = b"".join(open_split(folder, split).tobytes() for split in ("train", "val"))
    assert sorted(tokens[:-1].split(b"\0")) == sorted(text.encode() for text in TEXTS)


def test_the_command_knows_the_choice(command, tmp_path):
    write(tmp_path / "a.parquet", {"text": TEXTS})
    words = ["data=parquet", f"data.source.path={tmp_path / 'a.parquet'}", "model.block_size=8"]
    output = command("prepare", *words, f"data.root={tmp_path / 'data'}").stdout
    assert output.startswith("prepared parquet: 1,000 documents")
    assert " val tokens; val has whole documents) in " in output


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_text_that_is_not_utf8_is_no_damage_in_any_type_of_column(kind):
    same = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    column = pyarrow.array([b"caf\xe9", b"good"]).cast(same[kind]).view(kind)
    assert texts_in(column) == [b"caf\xe9", b"good"]


def test_a_nul_in_a_text_is_named_unless_the_tokenizer_has_it(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["good", "bad\0text"]})
    with pytest.raises(UserError, match=r"a\.parquet of the corpus has a text with a NUL byte"):
        texts(settings(tmp_path))
    assert texts(settings(tmp_path, tokenizer="gpt2")) == ["good", "bad\0text"]


def fault_of(source):
    """Return the line that reading ends with; None: it succeeds."""
    try:
        texts(source)
    except UserError as error:
        return str(error)
    return None


def test_any_damage_is_read_or_named_in_one_line(tmp_path):
    write(tmp_path / "a.parquet", {"text": TEXTS, "id": range(1000)}, row_group_size=300)
    path = tmp_path / "a.parquet"
    content = path.read_bytes()
    for seed in range(100):
        draw = random.Random(seed)
        damaged = bytearray(content)
        place = draw.choice([draw.randrange(len(content)), -draw.randrange(1, 600)])
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        line = fault_of(settings(path))
        assert line is None or (str(path) in line and "\n" not in line)
