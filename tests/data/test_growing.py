"""A corpus that grows: only its new documents are tokenized."""

import logging
import os
import re
import shutil

import numpy as np
import pytest

from lockstep_gpt.data import build
from lockstep_gpt.data.byte_pairs import BytePairTokenizer
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import hashes_of, load_index
from lockstep_gpt.data.sources.jsonl import JsonLines
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import ByteTokenizer

WORDS = ("a", "few", "words", "of", "text", "that", "come", "again")


def add(tmp_path, *numbers, lines=40):
    (tmp_path / "texts").mkdir(exist_ok=True)
    for number in numbers:
        draw = np.random.default_rng(number)
        text = "\n".join(f"{number} {' '.join(draw.choice(WORDS, 9))}" for _ in range(lines))
        (tmp_path / "texts" / f"{number}.txt").write_text(text + "\n")


def settings(tmp_path, root="data", **changes):
    settings = {"documents": "line", "val_fraction": 0.2, **changes}
    return Text(root=str(tmp_path / root), path=str(tmp_path / "texts"), **settings)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def tokenized(monkeypatch):
    """Collect the texts that a tokenizer encodes."""
    texts = []
    for kind in (ByteTokenizer, BytePairTokenizer):
        encode = kind.encode_documents

        def spied(self, documents, encode=encode):
            texts.extend(documents)
            return encode(self, documents)

        monkeypatch.setattr(kind, "encode_documents", spied)
    return texts


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The file of a byte-pair tokenizer."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    add(folder, 1, 2, 3)
    index = load_index(prepare(settings(folder, tokenizer="bpe", vocab_size=300)))
    (folder / "tokenizer.json").write_text(index.tokenizer["json"])
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("documents", ["line", "file"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_only_new_documents_are_tokenized(kind, documents, tmp_path, tokenized, request, caplog):
    caplog.set_level(logging.INFO)
    tokenizer = "bytes" if kind == "bytes" else request.getfixturevalue("bpe")
    changes = {"tokenizer": tokenizer, "documents": documents}
    add(tmp_path, 1, 2, 3)
    before = prepare(settings(tmp_path, **changes))
    expected = content(before)
    tokenized.clear()
    add(tmp_path, 0, 4)
    after = prepare(settings(tmp_path, **changes))
    assert set(re.findall(rb"\d", b"".join(tokenized))) == {b"0", b"4"}  # in front of each line
    assert before != after
    assert content(before) == expected
    assert f"of the documents are those of {before}" in caplog.text
    assert content(after) == content(prepare(settings(tmp_path, root="fresh", **changes)))


def test_a_changed_file_is_tokenized_again(tmp_path, tokenized):
    add(tmp_path, 1, 2, 3)
    prepare(settings(tmp_path))
    tokenized.clear()
    with (tmp_path / "texts/2.txt").open("a") as file:
        file.write("one more line\n")
    after = prepare(settings(tmp_path))
    assert tokenized == [b"one more line"]
    assert content(after) == content(prepare(settings(tmp_path, root="fresh")))


def test_a_removed_file_is_not_in_the_new_state(tmp_path, tokenized):
    add(tmp_path, 1, 2, 3)
    prepare(settings(tmp_path))
    tokenized.clear()
    (tmp_path / "texts/2.txt").unlink()
    after = prepare(settings(tmp_path))
    assert tokenized == []
    assert content(after) == content(prepare(settings(tmp_path, root="fresh")))


def test_several_processes_copy_the_same_tokens(tmp_path):
    add(tmp_path, 1, 2, 3, lines=4000)
    prepare(settings(tmp_path, shard_mb=1))
    add(tmp_path, 0, 4, lines=4000)
    after = prepare(settings(tmp_path, shard_mb=1, num_proc=2))
    assert content(after) == content(prepare(settings(tmp_path, root="fresh", shard_mb=1)))


def prepare_until_a_shard_is_full(tmp_path, monkeypatch):
    """Prepare shards of 1 MB, and be stopped after the first."""
    append = build.SplitWriter.append

    def stops(self, *arguments):
        if self.full:
            raise KeyboardInterrupt
        append(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(build.SplitWriter, "append", stops)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(tmp_path, shard_mb=1))


def test_a_build_that_stopped_continues_with_what_it_knew(tmp_path, monkeypatch):
    add(tmp_path, 1, 2, 3, lines=20_000)
    prepare(settings(tmp_path, shard_mb=1))
    add(tmp_path, 0, 4, lines=20_000)
    prepare_until_a_shard_is_full(tmp_path, monkeypatch)
    assert [*(tmp_path / "data").glob(".*.unfinished/train-00001.bin")]
    after = prepare(settings(tmp_path, shard_mb=1))
    assert content(after) == content(prepare(settings(tmp_path, root="fresh", shard_mb=1)))


def test_tokens_of_another_tokenizer_are_not_copied(tmp_path, tokenized, bpe):
    add(tmp_path, 1, 2)
    prepare(settings(tmp_path))
    tokenized.clear()
    prepare(settings(tmp_path, tokenizer=bpe))
    assert len([text for text in tokenized if text[:1].isdigit()]) == 80


@pytest.mark.parametrize("file", ["train-00000.bin", "val-00000.bin", "val.hashes"])
def test_a_damaged_byte_is_never_copied(file, tmp_path, tokenized, caplog):
    add(tmp_path, 1, 2)
    before = prepare(settings(tmp_path))
    content_before = (before / file).read_bytes()
    (before / file).write_bytes(bytes([content_before[0] ^ 1]) + content_before[1:])
    tokenized.clear()
    add(tmp_path, 3)
    after = prepare(settings(tmp_path))
    assert content(after) == content(prepare(settings(tmp_path, root="fresh")))
    (warning,) = [line for line in caplog.messages if "SHA-256" in line]
    assert warning.startswith(f"{before / file} does not match its SHA-256; delete the folder")
    assert warning.endswith("; its tokens are not copied")


def test_an_intact_state_is_copied_although_a_newer_one_is_damaged(tmp_path, tokenized):
    add(tmp_path, 1)
    oldest = prepare(settings(tmp_path))
    add(tmp_path, 2)
    newer = prepare(settings(tmp_path))
    (newer / "train-00000.bin").write_bytes(b"x" * (newer / "train-00000.bin").stat().st_size)
    os.utime(oldest, (1, 1))
    tokenized.clear()
    add(tmp_path, 3)
    prepare(settings(tmp_path))
    assert set(re.findall(rb"\d", b"".join(tokenized))) == {b"2", b"3"}


def test_leftovers_with_damaged_hashes_are_not_continued(tmp_path, monkeypatch, caplog):
    add(tmp_path, 1, 2, 3, lines=20_000)
    prepare_until_a_shard_is_full(tmp_path, monkeypatch)
    (hashes,) = tmp_path.glob("data/.*.unfinished/train.hashes")
    hashes.write_bytes(hashes.read_bytes()[:-16])  # as after a power failure
    after = prepare(settings(tmp_path, shard_mb=1))
    assert "train.hashes does not match its SHA-256; starting over" in caplog.text
    assert content(after) == content(prepare(settings(tmp_path, root="fresh", shard_mb=1)))


@pytest.mark.parametrize("damage", ["hashes", "tokens", "index"])
def test_a_damaged_state_is_not_used(damage, tmp_path, tokenized):
    add(tmp_path, 1, 2)
    before = prepare(settings(tmp_path))
    path = {
        "hashes": hashes_of(before, "train"),
        "tokens": before / "train-00000.bin",
        "index": before / "index.json",
    }[damage]
    path.write_bytes(path.read_bytes()[:-5])
    tokenized.clear()
    add(tmp_path, 3)
    after = prepare(settings(tmp_path))
    assert len(tokenized) == 120
    assert content(after) == content(prepare(settings(tmp_path, root="fresh")))


def test_a_deleted_state_is_not_needed(tmp_path):
    add(tmp_path, 1, 2)
    before = prepare(settings(tmp_path))
    add(tmp_path, 3)
    after = prepare(settings(tmp_path))
    shutil.rmtree(before)
    assert content(after) == content(prepare(settings(tmp_path, root="fresh")))


def test_objects_of_json_lines_are_documents_by_their_text(tmp_path, tokenized):
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts/a.jsonl"
    path.write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(50)))
    settings = {"root": str(tmp_path / "data"), "path": str(path), "val_fraction": 0.2}
    prepare(JsonLines(**settings))
    tokenized.clear()
    with path.open("a") as file:
        file.write('{"id": 7, "text": "line 50"}\n{"text": "line 3"}\n')
    prepare(JsonLines(**settings))
    assert tokenized == [b"line 50"]
