import random

import datasets
import numpy as np
import pytest

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.shards import load_index
from lockstep.tokens.sources.huggingface import HuggingFaceRows
from lockstep.tokens.sources.source import Position, splits_of_texts

TEXTS = [f"row {number} é" for number in range(700)]


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Keep the library's cache in the test's folder, and the test off the network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def table():
    return datasets.Dataset.from_dict({"id": range(702), "text": [*TEXTS, None, ""]})


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


def settings(folder, **changes):
    return HuggingFaceRows(path=str(folder), **changes)


def blocks(config, start=None):
    return list(config.blocks(start or Position()))


def texts(config):
    return [text.decode() for block in blocks(config) for text in block.texts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_folder_are_documents_in_order(tmp_path, form, streaming):
    form(tmp_path / "rows")
    assert texts(settings(tmp_path / "rows", streaming=streaming)) == TEXTS


def test_another_split_can_be_named(tmp_path):
    saved_with_splits(tmp_path / "rows")
    assert texts(settings(tmp_path / "rows", split="test")) == TEXTS[:1]


def test_rows_are_held_out_by_their_text(tmp_path):
    saved(tmp_path / "rows")
    all_blocks = blocks(settings(tmp_path / "rows", test_fraction=0.1))
    splits = [split for block in all_blocks for split in block.splits]
    assert splits == splits_of_texts([text.encode() for text in TEXTS], 0.02, 0.1)
    all_blocks = blocks(settings(tmp_path / "rows"))
    splits = [split for block in all_blocks for split in block.splits]
    assert splits == splits_of_texts([text.encode() for text in TEXTS], 0.02, 0)


def with_splits(folder):
    parts = {"train": TEXTS, "validation": ["v", "w"], "test": ["t"]}
    tables = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(folder)


def documents(config):
    """Return all documents with their splits."""
    all_blocks = blocks(config)
    return [pair for block in all_blocks for pair in zip(block.texts, block.splits, strict=True)]


def test_splits_of_a_dataset_are_validated_and_tested_on(tmp_path):
    with_splits(tmp_path / "rows")
    named = {"val_split": "validation", "test_split": "test", "val_fraction": 0.3}
    config = settings(tmp_path / "rows", **named, test_fraction=0.3)
    train = [(text.encode(), "train") for text in TEXTS]
    assert documents(config) == [*train, (b"v", "val"), (b"w", "val"), (b"t", "test")]
    assert config.has_test


@pytest.mark.parametrize(("split", "name"), [("val", "validation"), ("test", "test")])
def test_a_split_of_the_dataset_replaces_only_its_own_fraction(tmp_path, split, name):
    with_splits(tmp_path / "rows")
    fractions = {"val_fraction": 0.2, "test_fraction": 0.3}
    pairs = documents(settings(tmp_path / "rows", **{f"{split}_split": name}, **fractions))
    rest = {**fractions, f"{split}_fraction": 0.0}.values()
    texts = [text.encode() for text in TEXTS]
    expected = [*zip(texts, splits_of_texts(texts, *rest), strict=True)]
    assert pairs[: len(texts)] == expected
    assert {split for _, split in pairs[len(texts) :]} == {split}


def test_reading_several_splits_resumes_at_any_block(tmp_path):
    with_splits(tmp_path / "rows")
    config = settings(tmp_path / "rows", val_split="validation", test_split="test")
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
        folder = prepare(settings(tmp_path / "rows", root=root, **changes))
        assert [*load_index(folder).splits] == splits


def test_an_unknown_split_is_one_clear_line(tmp_path):
    with_splits(tmp_path / "rows")
    with pytest.raises(UserError, match=r"data\.source\.path=.* cannot be read: .*dev") as caught:
        blocks(settings(tmp_path / "rows", val_split="dev"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_resumes_at_any_block(tmp_path, streaming):
    in_parquet(tmp_path / "rows")
    config = settings(tmp_path / "rows", streaming=streaming)
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
    source = settings(tmp_path / "rows")
    assert source.size == pytest.approx(blocks(source)[-1].after.read, rel=0.1)
    assert settings(tmp_path / "stream", streaming=True).size is None


def test_identity_follows_the_files_of_a_folder(tmp_path):
    in_json(tmp_path / "rows")
    config = settings(tmp_path / "rows")
    before = config.identity()
    with (tmp_path / "rows/train.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert config.identity() != before


def test_the_identity_of_a_hub_name_is_its_settings(tmp_path):
    folders = set()
    changes = ({}, {"revision": "v2"}, {"subset": "en"}, {"split": "test"}, {"val_split": "val"})
    for change in changes:
        config = settings("someone/texts", root=str(tmp_path), **change)
        folders.add(recipe_of(config).fingerprint)
    assert len(folders) == 5


def test_a_missing_field_is_rejected_with_the_existing_ones(tmp_path):
    saved(tmp_path / "rows")
    with pytest.raises(
        UserError, match=r"lacks the field data\.source\.field=body; it has id, text"
    ):
        texts(settings(tmp_path / "rows", field="body"))


def test_a_name_that_cannot_be_reached_is_one_clear_line():
    with pytest.raises(
        UserError, match=r"data\.source\.path=no/body cannot be read: .*; fix"
    ) as caught:
        texts(settings("no/body"))
    assert "\n" not in str(caught.value)


def test_a_folder_is_prepared_whole(tmp_path):
    in_parquet(tmp_path / "rows")
    config = settings(tmp_path / "rows", root=str(tmp_path / "data"), val_fraction=0.2)
    splits = load_index(prepare(config)).splits
    assert sum(split.documents for split in splits.values()) == len(TEXTS)
    assert sum(split.text_bytes for split in splits.values()) == len("".join(TEXTS).encode())


def test_a_nul_in_a_row_is_named(tmp_path):
    datasets.Dataset.from_dict({"text": ["good", "bad\0text"]}).save_to_disk(tmp_path / "rows")
    with pytest.raises(UserError, match=r"rows of the corpus has a text with a NUL byte"):
        texts(settings(tmp_path / "rows"))


def fault_of(config):
    """Return the line that reading ends with; None: it succeeds."""
    try:
        texts(config)
    except UserError as error:
        return str(error)
    return None


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
        line = fault_of(settings(tmp_path / "rows"))
        assert line is None or (str(tmp_path / "rows") in line and "\n" not in line)


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_an_offset_beyond_its_buffer_does_not_end_the_process(tmp_path, value):
    saved(tmp_path / "rows")
    (path,) = (tmp_path / "rows").glob("*.arrow")
    content = bytearray(path.read_bytes())
    offsets = np.cumsum([0, *(len(text.encode()) for text in TEXTS)], dtype="<i4").tobytes()
    place = content.index(offsets) + 4 * 300
    content[place + 3] = value  # of row 300: 2 GB later, or a negative one
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows cannot be read: .*; fix it, or choose another"):
        texts(settings(tmp_path / "rows"))
