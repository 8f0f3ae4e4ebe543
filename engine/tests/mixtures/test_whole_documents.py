"""Packed windows in a prepared folder: who writes them, what is refused, and their tokens."""

import json
import threading

import numpy as np
import pytest

from lockstep.errors import UserError
from lockstep.functional import IGNORE
from lockstep.mixtures import whole_documents
from lockstep.mixtures.packed_windows import PackedWindows
from lockstep.mixtures.whole_documents import (
    WholeDocuments,
    best_fit,
    ends_of_documents,
    folder_within,
    load,
    pack,
    windows_of,
)
from lockstep.tokens.prepare import prepare
from lockstep.tokens.prepared import counts_within, open_windows
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources.text import Text


@pytest.fixture
def prepared(tmp_path):
    """Return a prepared folder of 40 documents, of which two are empty."""
    draw = np.random.default_rng(1)
    (tmp_path / "text").mkdir()
    for number in range(40):
        words = draw.choice([*"abcdefgh \n"], 0 if number in (3, 9) else 5 + 3 * number)
        (tmp_path / "text" / f"{number}.txt").write_text("".join(words))
    return prepare(Text(root=str(tmp_path), path=str(tmp_path / "text"), val_fraction=0.3))


def test_the_windows_of_a_split_are_written_once_and_read_by_all(prepared, caplog):
    caplog.set_level("INFO")
    threads = [threading.Thread(target=pack, args=(prepared, 16)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.message.partition(" ")[0] for record in caplog.records].count("packed") == 1
    assert "have no text, only their end, which is kept" in caplog.text
    packed = folder_within(prepared, 16)
    before = {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert pack(prepared, 16) == packed
    assert before == {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert pack(prepared, 24) != packed


def test_validation_has_each_held_out_target_once_and_none_in_padding(prepared):
    pack(prepared, 16)
    tokens = np.asarray(open_split(prepared, "val"))
    windows = PackedWindows(prepared, "val", 16)
    count = load(folder_within(prepared, 16))["val"].windows
    stored = windows.collate(windows.__getitems__([*range(count), 0]))
    batch = windows.widen(windows.pad(stored, count))
    inputs, targets = (part.roll(1, 0) for part in batch)
    assert (targets[0] == IGNORE).all()
    counted = targets != IGNORE
    assert sorted(targets[counted].tolist()) == sorted(tokens[1:].tolist())
    assert sorted(inputs[counted].tolist()) == sorted(tokens[:-1].tolist())
    padding = inputs[1:][~counted[1:]]
    assert len(padding) == load(folder_within(prepared, 16))["val"].padding
    assert (padding != 0).all(), "each would be a document"
    lasts = counted.int().diff(dim=1)
    assert (lasts <= 0).all(), "padding comes last, where no other token sees it"


def test_a_killed_build_leaves_nothing_that_is_read(prepared):
    unfinished = prepared / ".packed-16.unfinished"
    unfinished.mkdir()
    (unfinished / "train-starts.npy").write_bytes(b"half")
    pack(prepared, 16)
    assert not unfinished.exists()
    assert load(folder_within(prepared, 16))["train"].windows


@pytest.mark.parametrize("file", ["index.json", "train-starts.npy", "train-first.npy"])
@pytest.mark.parametrize("content", [b"", b"{}", b"garbage"])
def test_a_damaged_file_is_named_with_the_remedy(prepared, file, content):
    packed = pack(prepared, 16)
    (packed / file).write_bytes(content)
    with pytest.raises(UserError, match="packed-16 is damaged; delete that folder"):
        PackedWindows(prepared, "train", 16)


FILES = ["index.json", "train-starts.npy", "train-lengths.npy", "val-first.npy"]


@pytest.mark.parametrize("file", FILES)
def test_any_changed_byte_is_found_before_the_windows_are_used(prepared, file):
    packed = pack(prepared, 16)
    content = (packed / file).read_bytes()
    for place in range(0, len(content), 11):
        damaged = bytearray(content)
        damaged[place] ^= 2
        (packed / file).write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"packed-16 is damaged.*; delete that folder"
        ) as caught:
            pack(prepared, 16)
        assert "\n" not in str(caught.value)


def test_windows_of_an_earlier_version_are_read(prepared):
    packed = pack(prepared, 16)
    expected = load(packed)
    values = json.loads((packed / "index.json").read_text())
    del values["sha256"]
    del values["files"]
    (packed / "index.json").write_text(json.dumps(values))
    assert load(pack(prepared, 16)) == expected
    content = (packed / "train-starts.npy").read_bytes()
    (packed / "train-starts.npy").write_bytes(content.replace(b"'shape'", b"'shope'"))
    with pytest.raises(UserError, match="packed-16 is damaged; delete that folder"):
        pack(prepared, 16)


def test_damaged_tokens_are_not_packed(prepared):
    tokens = prepared / "train-00000.bin"
    tokens.write_bytes(b"x" + tokens.read_bytes()[1:])
    with pytest.raises(UserError, match=r"train-00000\.bin does not match its SHA-256; delete the"):
        pack(prepared, 16)
    assert not folder_within(prepared, 16).exists()


def test_files_of_another_format_are_refused(prepared):
    packed = pack(prepared, 16)
    values = json.loads((packed / "index.json").read_text())
    del values["sha256"]
    (packed / "index.json").write_text(json.dumps({**values, "format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 1"):
        load(packed)


def test_a_document_that_never_ends_is_refused_in_one_line(prepared, monkeypatch):
    monkeypatch.setattr(whole_documents, "LONGEST", 50)
    with pytest.raises(UserError, match=r"a document of \d+ tokens begins at token [\d,]+ of t"):
        pack(prepared, 16)
    assert not [*prepared.glob("packed*"), *prepared.glob(".packed*.unfinished")]


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(prepared, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_documents, "put_in_place", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        pack(prepared, 16)


def test_packing_does_not_change_the_prepared_tokens(prepared):
    """So one prepared folder serves every packing."""
    before = {path.name: path.read_bytes() for path in prepared.iterdir()}
    pack(prepared, 16)
    assert {path.name: path.read_bytes() for path in prepared.iterdir() if path.is_file()} == {
        **before,
        ".packed-16.lock": b"",
    }


def test_packed_windows_are_counted(prepared):
    windows = open_windows(prepared, 16, WholeDocuments())
    facts = load(folder_within(prepared, 16))
    assert len(windows["train"]) == facts["train"].windows
    assert windows["val"].counts[""] == facts["val"].windows
    assert counts_within(windows["val"].counts, 33, 16) == {"": 2}
    stream = load_index(prepared).windows("train", 16)
    assert facts["train"].windows >= stream


def one_by_one(lengths, size):
    """Best-fit decreasing as textbooks write it; return how full the bins are."""
    free = []
    for length in sorted(lengths, reverse=True):
        fits = [space for space in free if space >= length]
        space = min(fits) if fits else size
        if fits:
            free.remove(space)
        free.append(space - length)
    return sorted(free)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_fills_bins_as_if_pieces_came_one_by_one(seed):
    draw = np.random.default_rng(seed)
    size = int(draw.integers(1, 60))
    lengths = draw.integers(1, size + 1, int(draw.integers(0, 300)))
    bins, made = best_fit(lengths, size)
    filled = np.bincount(bins, weights=lengths, minlength=made)
    assert filled.max(initial=0) <= size
    assert sorted(size - filled) == one_by_one(lengths.tolist(), size)


def tokens_of(lengths, draw, *, ended=True):
    """Return documents of these lengths; 0 ends each."""
    tokens = draw.integers(1, 50, sum(lengths)).astype(np.uint8)
    tokens[np.cumsum(lengths) - 1] = 0
    return tokens if ended else tokens[:-1]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_each_token_but_the_last_is_in_one_window_and_only_a_cut_splits_documents(seed, ended):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, [3, 10, 40, 90][seed % 4], 200).tolist()
    tokens = tokens_of(lengths, draw, ended=ended)
    size = 16
    starts, sizes, first, facts = windows_of(ends_of_documents(tokens, 0), size)
    seen = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
    assert sorted(seen) == [*range(len(tokens) - 1)]
    begins = {0, *(np.flatnonzero(tokens == 0) + 1).tolist()}
    unbroken = 0
    for window in range(facts.windows):
        pieces = range(first[window], first[window + 1])
        assert 0 < sum(sizes[pieces.start : pieces.stop]) <= size
        for piece in pieces[:-1]:  # what follows is another document, also for the mask
            assert tokens[starts[piece] + sizes[piece] - 1] == 0
        heads = [starts[piece] in begins for piece in pieces]
        assert heads == sorted(heads, reverse=True) or starts[pieces[-1]] + sizes[pieces[-1]] == (
            len(tokens) - 1
        )
        unbroken += heads[0]
    assert facts.whole == unbroken
    assert facts.padding == facts.windows * size - len(tokens) + 1


def test_ends_are_found_across_the_parts_that_are_searched(monkeypatch):
    tokens = tokens_of([3, 1, 1, 7, 2], np.random.default_rng(0))
    monkeypatch.setattr(whole_documents, "SCANNED", 4)
    assert ends_of_documents(tokens, 0).tolist() == [3, 4, 5, 12, 14]
    assert ends_of_documents(tokens[:-1], 0).tolist() == [3, 4, 5, 12, 13]
