import datasets
import pytest

from lockstep_gpt.config import UserError, data_sources
from lockstep_gpt.data.prepare import prepare, recipe_of
from lockstep_gpt.data.shards import load_index
from lockstep_gpt.data.sources.source import Position, held_out
from lockstep_gpt.data.sources.stdlib import corpus_of

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
    return data_sources()["huggingface"](path=str(folder), **changes)


def blocks(config, start=None):
    return list(corpus_of(config).blocks(start or Position()))


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
    held = [val for block in blocks(settings(tmp_path / "rows")) for val in block.val]
    assert held == held_out([text.encode() for text in TEXTS], 0.02)


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_resumes_at_any_block(tmp_path, streaming):
    in_parquet(tmp_path / "rows")
    config = settings(tmp_path / "rows", streaming=streaming)
    whole = blocks(config)
    assert len(whole) == 3
    for number, block in enumerate(whole):
        rest = blocks(config, block.after)
        assert [each.texts for each in rest] == [each.texts for each in whole[number + 1 :]]
        assert [each.after[:2] for each in rest] == [each.after[:2] for each in whole[number + 1 :]]


def test_a_size_is_known_before_the_end_except_of_a_stream(tmp_path):
    saved(tmp_path / "rows")
    in_json(tmp_path / "stream")
    corpus = corpus_of(settings(tmp_path / "rows"))
    assert corpus.size == pytest.approx(blocks(corpus.config)[-1].after.read, rel=0.1)
    streaming = settings(tmp_path / "stream", streaming=True)
    assert corpus_of(streaming).size is None


def test_identity_follows_the_files_of_a_folder(tmp_path):
    in_json(tmp_path / "rows")
    config = settings(tmp_path / "rows")
    before = corpus_of(config).identity()
    with (tmp_path / "rows/train.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert corpus_of(config).identity() != before


def test_the_identity_of_a_hub_name_is_its_settings(tmp_path):
    folders = set()
    for change in ({}, {"revision": "v2"}, {"subset": "en"}, {"split": "test"}):
        config = settings("someone/texts", root=str(tmp_path), **change)
        folders.add(recipe_of(config).fingerprint)
    assert len(folders) == 4


def test_a_missing_field_is_rejected_with_the_existing_ones(tmp_path):
    saved(tmp_path / "rows")
    with pytest.raises(UserError, match=r"lacks the field data\.field=body; it has id, text"):
        texts(settings(tmp_path / "rows", field="body"))


def test_a_name_that_cannot_be_reached_is_one_clear_line():
    with pytest.raises(UserError, match=r"data\.path=no/body cannot be read: .*; fix") as caught:
        texts(settings("no/body"))
    assert "\n" not in str(caught.value)


def test_a_folder_is_prepared_whole(tmp_path):
    in_parquet(tmp_path / "rows")
    config = settings(tmp_path / "rows", root=str(tmp_path / "data"), val_fraction=0.2)
    splits = load_index(prepare(config)).splits
    assert sum(split.documents for split in splits.values()) == len(TEXTS)
    assert sum(split.text_bytes for split in splits.values()) == len("".join(TEXTS).encode())
