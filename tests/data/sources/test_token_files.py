import numpy as np
import pytest

from lockstep_gpt.config import UserError, data_sources
from lockstep_gpt.data.byte_pairs import make_tokenizer
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import load_index, open_split
from lockstep_gpt.data.sources import token_files
from lockstep_gpt.data.sources.source import Position
from lockstep_gpt.data.sources.stdlib import corpus_of
from lockstep_gpt.data.tokenizer import from_dict

IDS = np.random.default_rng(0).integers(50_257, size=5000)
MAGIC = {"<u2": 20240520, "<u4": 20240801}


def write(path, ids, dtype="<u2", header=True):
    words = np.zeros(256, "<i4")
    words[:3] = MAGIC[dtype], 1, len(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(words.tobytes() * header + np.asarray(ids).astype(dtype).tobytes())
    return path


def settings(path, **changes):
    return data_sources()["shards"](path=str(path), **changes)


def blocks(config, start=None):
    return list(corpus_of(config).blocks(start or Position()))


def split(config, name):
    return np.concatenate([block.ids for block in blocks(config) if block.split == name])


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_tokens_come_in_order_with_and_without_a_header(tmp_path, header, name, dtype):
    write(tmp_path / "b.bin", IDS[3000:], dtype, header)
    write(tmp_path / "a.bin", IDS[:3000], dtype, header)
    config = settings(tmp_path, dtype=name if not header else "uint16")
    tokens = np.concatenate([block.ids for block in blocks(config)])
    np.testing.assert_array_equal(tokens, IDS)


def test_a_file_for_validation_is_held_out(tmp_path):
    train, val = write(tmp_path / "t.bin", IDS), write(tmp_path / "v/v.bin", IDS[:77])
    config = settings(train, val_path=str(val))
    np.testing.assert_array_equal(split(config, "train"), IDS)
    np.testing.assert_array_equal(split(config, "val"), IDS[:77])


def test_without_a_validation_file_stretch_ends_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "STRETCH", 1000)
    config = settings(write(tmp_path / "t.bin", IDS[:4500]), val_fraction=0.1)
    stretches = np.split(IDS[:4500], [1000, 2000, 3000, 4000])
    ends = [len(each) - len(each) // 10 for each in stretches]
    expected = np.concatenate([each[end:] for each, end in zip(stretches, ends, strict=True)])
    np.testing.assert_array_equal(split(config, "val"), expected)
    assert split(config, "train").size == 4050


@pytest.mark.parametrize("val", [None, "v.bin"])
def test_reading_resumes_at_any_block(tmp_path, monkeypatch, val):
    monkeypatch.setattr(token_files, "STRETCH", 1000)
    for name in ("a.bin", "b.bin", "v.bin"):
        write(tmp_path / name, IDS)
    config = settings(tmp_path / "[ab].bin", val_path=val and str(tmp_path / val))
    whole = blocks(config)
    assert len(whole) >= 15
    for number, block in enumerate(whole):
        rest = blocks(config, block.after)
        assert [each.after for each in rest] == [each.after for each in whole[number + 1 :]]
        assert [each.ids.tolist() for each in rest] == [
            each.ids.tolist() for each in whole[number + 1 :]
        ]


@pytest.mark.parametrize("header", [False, True])
def test_a_truncated_file_is_one_clear_line(tmp_path, header):
    path = write(tmp_path / "t.bin", IDS, header=header)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"t\.bin of the corpus has [\d,]+ bytes, but"):
        blocks(settings(path))


def test_a_token_above_the_vocabulary_is_rejected_by_name(tmp_path):
    path = write(tmp_path / "t.bin", [1, 2, 300])
    with pytest.raises(UserError, match=r"t\.bin of the corpus has the token 300, but data\.voc"):
        blocks(settings(path, vocab_size=300))


def test_prepared_tokens_are_those_of_the_files(tmp_path):
    write(tmp_path / "t.bin", IDS)
    write(tmp_path / "v.bin", IDS[:99])
    config = settings(
        tmp_path / "t.bin", val_path=str(tmp_path / "v.bin"), root=str(tmp_path / "data")
    )
    folder = prepare(config)
    np.testing.assert_array_equal(open_split(folder, "train"), IDS)
    np.testing.assert_array_equal(open_split(folder, "val"), IDS[:99])
    assert load_index(folder).tokenizer["vocab_size"] == 50_257


@pytest.fixture
def tokenizer(tmp_path):
    """A small byte-level BPE, in a file."""
    made = make_tokenizer("bpe", 300, ["some words and some more words"])
    (tmp_path / "tokenizer.json").write_text(made.to_dict()["json"])
    return made


def test_the_tokenizer_is_saved_with_the_tokens(tmp_path, tokenizer):
    ids = tokenizer.encode("some more words")
    config = settings(
        write(tmp_path / "t.bin", np.tile(ids, 99)),
        tokenizer=str(tmp_path / "tokenizer.json"),
        vocab_size=tokenizer.vocab_size,
        root=str(tmp_path / "data"),
    )
    folder = prepare(config)
    known = from_dict(load_index(folder).tokenizer)
    assert known.decode(open_split(folder, "train")[: len(ids)]) == "some more words"


def test_a_tokenizer_of_another_size_is_rejected(tmp_path, tokenizer):
    config = settings(write(tmp_path / "t.bin", IDS), tokenizer=str(tmp_path / "tokenizer.json"))
    line = rf"data\.vocab_size=50257 is not that of .*; set data\.vocab_size={tokenizer.vocab_size}"
    with pytest.raises(UserError, match=line):
        corpus_of(config).make_tokenizer()
