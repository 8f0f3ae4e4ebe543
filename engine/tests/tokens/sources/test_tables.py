import random

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources.source import Position, splits_of_texts
from lockstep.tokens.sources.tables import HuggingFaceRows, ParquetFiles, texts_in

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
    monkeypatch.setattr("lockstep.tokens.sources.tables.BLOCK", 500)
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


ROWS = TEXTS[:700]


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Keep the library's cache in the test's folder, and the test off the network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def table():
    return datasets.Dataset.from_dict({"id": range(702), "text": [*ROWS, None, ""]})


def saved(folder):
    table().save_to_disk(folder)


def saved_with_splits(folder):
    datasets.DatasetDict({"train": table(), "test": table().select([0])}).save_to_disk(folder)


def in_parquet(folder):
    folder.mkdir()
    table().to_parquet(folder / "train.parquet")


def in_json(folder):
    folder.mkdir()
    table().to_json(folder / "train.jsonl")


FORMS = [saved, saved_with_splits, in_parquet, in_json]


def dataset(folder, **changes):
    return HuggingFaceRows(path=str(folder), **changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_folder_are_documents_in_order(tmp_path, form, streaming):
    form(tmp_path / "rows")
    assert texts(dataset(tmp_path / "rows", streaming=streaming)) == ROWS


def test_another_split_can_be_named(tmp_path):
    saved_with_splits(tmp_path / "rows")
    assert texts(dataset(tmp_path / "rows", split="test")) == ROWS[:1]


def test_rows_of_a_dataset_are_held_out_by_their_text(tmp_path):
    saved(tmp_path / "rows")
    all_blocks = blocks(dataset(tmp_path / "rows", test_fraction=0.1))
    splits = [split for block in all_blocks for split in block.splits]
    assert splits == splits_of_texts([text.encode() for text in ROWS], 0.02, 0.1)
    all_blocks = blocks(dataset(tmp_path / "rows"))
    splits = [split for block in all_blocks for split in block.splits]
    assert splits == splits_of_texts([text.encode() for text in ROWS], 0.02, 0)


def with_splits(folder):
    parts = {"train": ROWS, "validation": ["v", "w"], "test": ["t"]}
    tables = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(folder)


def documents(config):
    """Return all documents with their splits."""
    all_blocks = blocks(config)
    return [pair for block in all_blocks for pair in zip(block.texts, block.splits, strict=True)]


def test_splits_of_a_dataset_are_validated_and_tested_on(tmp_path):
    with_splits(tmp_path / "rows")
    named = {"val_split": "validation", "test_split": "test", "val_fraction": 0.3}
    config = dataset(tmp_path / "rows", **named, test_fraction=0.3)
    train = [(text.encode(), "train") for text in ROWS]
    assert documents(config) == [*train, (b"v", "val"), (b"w", "val"), (b"t", "test")]
    assert config.has_test


@pytest.mark.parametrize(("split", "name"), [("val", "validation"), ("test", "test")])
def test_a_split_of_the_dataset_replaces_only_its_own_fraction(tmp_path, split, name):
    with_splits(tmp_path / "rows")
    fractions = {"val_fraction": 0.2, "test_fraction": 0.3}
    pairs = documents(dataset(tmp_path / "rows", **{f"{split}_split": name}, **fractions))
    rest = {**fractions, f"{split}_fraction": 0.0}.values()
    texts = [text.encode() for text in ROWS]
    expected = [*zip(texts, splits_of_texts(texts, *rest), strict=True)]
    assert pairs[: len(texts)] == expected
    assert {split for _, split in pairs[len(texts) :]} == {split}


def test_reading_several_splits_resumes_at_any_block(tmp_path):
    with_splits(tmp_path / "rows")
    config = dataset(tmp_path / "rows", val_split="validation", test_split="test")
    all_blocks = blocks(config)
    assert len(all_blocks) == 5
    for number, block in enumerate(all_blocks):
        assert blocks(config, block.after) == all_blocks[number + 1 :]


def test_there_is_a_test_split_only_if_asked_for(tmp_path):
    with_splits(tmp_path / "rows")
    root = str(tmp_path / "data")
    for changes, splits in (
        ({"val_fraction": 0.2}, ["train", "val"]),
        ({"val_split": "validation"}, ["train", "val"]),
        ({"val_split": "validation", "test_split": "test"}, ["train", "val", "test"]),
    ):
        folder = prepare(dataset(tmp_path / "rows", root=root, **changes))
        assert [*load_index(folder).splits] == splits


def test_an_unknown_split_is_one_clear_line(tmp_path):
    with_splits(tmp_path / "rows")
    with pytest.raises(UserError, match=r"data\.source\.path=.* cannot be read: .*dev") as caught:
        blocks(dataset(tmp_path / "rows", val_split="dev"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_a_dataset_resumes_at_any_block(tmp_path, streaming):
    in_parquet(tmp_path / "rows")
    config = dataset(tmp_path / "rows", streaming=streaming)
    all_blocks = blocks(config)
    assert len(all_blocks) == 3
    for number, block in enumerate(all_blocks):
        rest = blocks(config, block.after)
        assert [block.texts for block in rest] == [
            block.texts for block in all_blocks[number + 1 :]
        ]
        assert [block.after[:2] for block in rest] == [
            block.after[:2] for block in all_blocks[number + 1 :]
        ]


def test_a_size_is_known_before_the_end_except_of_a_stream(tmp_path):
    saved(tmp_path / "rows")
    in_json(tmp_path / "stream")
    source = dataset(tmp_path / "rows")
    assert source.size == pytest.approx(blocks(source)[-1].after.read, rel=0.1)
    assert dataset(tmp_path / "stream", streaming=True).size is None


def test_identity_follows_the_files_of_a_folder(tmp_path):
    in_json(tmp_path / "rows")
    config = dataset(tmp_path / "rows")
    before = config.identity()
    with (tmp_path / "rows/train.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert config.identity() != before


def test_the_identity_of_a_hub_name_is_its_settings(tmp_path):
    folders = set()
    changes = ({}, {"revision": "v2"}, {"subset": "en"}, {"split": "test"}, {"val_split": "val"})
    for change in changes:
        config = dataset("someone/texts", root=str(tmp_path), **change)
        folders.add(recipe_of(config).fingerprint)
    assert len(folders) == 5


def test_a_missing_field_is_rejected_with_the_existing_ones(tmp_path):
    saved(tmp_path / "rows")
    with pytest.raises(
        UserError, match=r"lacks the field data\.source\.field=body; it has id, text"
    ):
        texts(dataset(tmp_path / "rows", field="body"))


def test_a_name_that_cannot_be_reached_is_one_clear_line():
    with pytest.raises(
        UserError, match=r"data\.source\.path=no/body cannot be read: .*; fix"
    ) as caught:
        texts(dataset("no/body"))
    assert "\n" not in str(caught.value)


def test_a_dataset_is_prepared_whole(tmp_path):
    in_parquet(tmp_path / "rows")
    config = dataset(tmp_path / "rows", root=str(tmp_path / "data"), val_fraction=0.2)
    splits = load_index(prepare(config)).splits
    assert sum(split.documents for split in splits.values()) == len(ROWS)
    assert sum(split.text_bytes for split in splits.values()) == len("".join(ROWS).encode())


def test_a_nul_in_a_row_is_named(tmp_path):
    datasets.Dataset.from_dict({"text": ["good", "bad\0text"]}).save_to_disk(tmp_path / "rows")
    with pytest.raises(UserError, match=r"rows of the corpus has a text with a NUL byte"):
        texts(dataset(tmp_path / "rows"))


def test_damaged_arrow_files_are_read_or_named(tmp_path):
    saved(tmp_path / "rows")
    (path,) = (tmp_path / "rows").glob("*.arrow")
    content = path.read_bytes()
    for seed in range(60):
        draw = random.Random(seed)
        damaged = bytearray(content)
        place = draw.choice([draw.randrange(len(content)), draw.randrange(1200)])
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        line = fault_of(dataset(tmp_path / "rows"))
        assert line is None or (str(tmp_path / "rows") in line and "\n" not in line)


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_an_offset_beyond_its_buffer_does_not_end_the_process(tmp_path, value):
    saved(tmp_path / "rows")
    (path,) = (tmp_path / "rows").glob("*.arrow")
    content = bytearray(path.read_bytes())
    offsets = np.cumsum([0, *(len(text.encode()) for text in ROWS)], dtype="<i4").tobytes()
    place = content.index(offsets) + 4 * 300
    content[place + 3] = value  # of row 300: 2 GB later, or a negative one
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows cannot be read: .*; fix it, or choose another"):
        texts(dataset(tmp_path / "rows"))
