"""What all sources have in common: how documents are divided, and a source of your own."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from lockstep.errors import UserError
from lockstep.settings import setting
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources import source as module
from lockstep.tokens.sources.source import (
    Documents,
    Position,
    split_of_name,
    splits_of_texts,
    training_texts,
)

FORMS = ["{}", "line {:05}", "{:09} of many equal lines"]


@pytest.mark.parametrize("form", FORMS)
def test_the_share_of_held_out_lines_is_kept(form):
    texts = [form.format(number).encode() for number in range(20_000)]
    held = splits_of_texts(texts, 0.1, 0)
    assert held.count("val") == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)
    assert held.count("train") == 20_000 - held.count("val")


@pytest.mark.parametrize("form", FORMS)
def test_the_shares_of_validation_and_test_lines_are_kept(form):
    texts = [form.format(number).encode() for number in range(20_000)]
    splits = splits_of_texts(texts, 0.1, 0.2)
    assert splits.count("val") == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)
    assert splits.count("test") == pytest.approx(4000, abs=4 * (20_000 * 0.2 * 0.8) ** 0.5)


def by_text(names, val, test):
    return splits_of_texts([name.encode() for name in names], val, test)


def by_name(names, val, test):
    return [split_of_name(name, val, test) for name in names]


@pytest.mark.parametrize("rule", [by_text, by_name])
def test_a_test_split_takes_only_from_training(rule):
    names = [f"document {number}" for number in range(1000)]
    before, after = rule(names, 0.1, 0), rule(names, 0.1, 0.2)
    pairs = {*zip(before, after, strict=True)}
    assert pairs == {("val", "val"), ("train", "train"), ("train", "test")}


@pytest.mark.parametrize("rule", [by_text, by_name])
def test_a_larger_share_only_adds_validation_documents(rule):
    names = [str(number) for number in range(500)]
    pairs = {*zip(rule(names, 0.1, 0), rule(names, 0.3, 0), strict=True)}
    assert pairs == {("val", "val"), ("train", "val"), ("train", "train")}


def test_the_split_of_a_name_is_the_same_everywhere():
    names = [f"folder/module_{number}.py" for number in range(12)]
    splits = "".join(split_of_name(name, 0.5, 0)[0] for name in names)
    assert splits == "vttvvvtvvvvv"


def test_the_split_of_a_text_is_the_same_everywhere():
    texts = [f"text {number}".encode() for number in range(12)]
    assert (
        "".join(split[:2] for split in splits_of_texts(texts, 0.3, 0.3))
        == "trtrtrvavatrtrtetetetete"
    )


def test_the_share_of_validation_documents_is_kept():
    splits = [split_of_name(str(number), 0.1, 0) for number in range(5000)]
    assert splits.count("val") == pytest.approx(500, abs=4 * (5000 * 0.1 * 0.9) ** 0.5)


TEXTS = [f"document {number} é" for number in range(300)]


@dataclass
class Own(Documents):
    """A source as a user would write it, only from `read_documents` and `identity`."""

    kind: ClassVar[str] = "mine"

    many: int = setting("documents", 300)

    def identity(self):
        return self.many

    def read_documents(self):
        for number, text in enumerate(TEXTS[: self.many]):
            yield text if number % 2 else text.encode()
            if number == 7:
                yield ""


def blocks(source, start=None):
    return list(source.blocks(start or Position()))


def test_documents_of_an_own_source_are_read_in_order_and_split_by_their_text():
    (block,) = blocks(source := Own(val_fraction=0.3, test_fraction=0.2))
    assert block.texts == [text.encode() for text in TEXTS]
    assert block.splits == splits_of_texts(block.texts, 0.3, 0.2)
    assert {*block.splits} == {"train", "val", "test"}
    assert (source.size, source.has_test, source.held_out) == (None, True, "whole documents")


@pytest.mark.parametrize("size", [1, 20, 400])
def test_reading_an_own_source_resumes_at_any_block(monkeypatch, size):
    monkeypatch.setattr(module, "BLOCK", size)
    all_blocks = blocks(Own())
    assert len(all_blocks) > 9
    for number, block in enumerate(all_blocks):
        assert blocks(Own(), block.after) == all_blocks[number + 1 :]


def test_an_own_source_resumes_at_any_document():
    for number in range(0, 302, 43):
        rest = [text for block in blocks(Own(), Position(0, number)) for text in block.texts]
        skipped = number - (number > 8)  # the empty document counts, too
        assert rest == [text.encode() for text in TEXTS[skipped:]]


def test_an_own_source_is_prepared_whole(tmp_path):
    folder = prepare(Own(root=str(tmp_path), val_fraction=0.3, test_fraction=0.2))
    assert folder.name.startswith("mine-")
    splits = load_index(folder).splits
    assert [*splits] == ["train", "val", "test"]
    texts = []
    for name, split in splits.items():
        documents = open_split(folder, name).tobytes()[:-1].split(b"\0")
        assert {*splits_of_texts(documents, 0.3, 0.2)} == {name}
        assert (len(documents), sum(map(len, documents))) == (split.documents, split.text_bytes)
        texts += documents
    assert sorted(texts) == sorted(text.encode() for text in TEXTS)


def test_settings_of_an_own_source_decide_its_folder(tmp_path):
    made = {prepare(Own(root=str(tmp_path), many=many, val_fraction=0.3)) for many in (100, 200)}
    assert len(made) == 2


@dataclass
class Damaged(Own):
    def read_documents(self):
        yield from (b"caf\xe9", "half a pair \ud83d", b"good")


def test_invalid_text_of_an_own_source_follows_the_policy():
    (block,) = blocks(Damaged())
    assert (block.texts, block.invalid) == (["caf\ufffd".encode(), b"half a pair ?", b"good"], 1)
    (block,) = blocks(Damaged(invalid_utf8="skip"))
    assert (block.texts, block.invalid) == ([b"half a pair ?", b"good"], 1)
    with pytest.raises(UserError, match=r"mine of the corpus is not UTF-8"):
        blocks(Damaged(invalid_utf8="fail"))


def test_a_tokenizer_learns_from_training_documents_alone():
    source = Own(val_fraction=0.3, test_fraction=0.2)
    (block,) = blocks(source)
    train = [
        text for text, split in zip(block.texts, block.splits, strict=True) if split == "train"
    ]
    assert [text.encode() for text in training_texts(source, 1 << 20)] == train


def test_a_source_without_documents_says_what_it_lacks():
    @dataclass
    class Empty(Documents):
        def identity(self):
            return None

    with pytest.raises(NotImplementedError, match="Empty yields its documents here"):
        blocks(Empty())


def test_fractions_that_leave_nothing_to_train_on_are_rejected():
    line = r"^test_fraction=0\.5 and val_fraction=0\.5 leave nothing$"
    with pytest.raises(UserError, match=line):
        Own(val_fraction=0.5, test_fraction=0.5)
