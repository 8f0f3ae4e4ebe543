import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from lockstep_gpt.config import PROGRAM, UserError
from lockstep_gpt.data import tokenizer as module
from lockstep_gpt.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    NumberTokenizer,
    cut,
    from_dict,
    library,
    make_tokenizer,
    token_dtype,
)

UTF8_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
WORDS = [
    "def f(x):\n    return x + 1\n",
    "the cat sat on the mat, didn't it?\n\n",
    "naïve 漢字 😀\t",
]
TEXTS = [word * 20 for word in WORDS]


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe", 400, TEXTS)


@given(UTF8_TEXT)
def test_bytes_decode_inverts_encode(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text() | st.binary())
def test_an_encoded_text_never_holds_the_end_of_text(text):
    assert ByteTokenizer.end_of_text not in ByteTokenizer().encode(text)


def test_a_nul_becomes_a_space_and_every_byte_stays_one_token():
    assert ByteTokenizer().encode(b"a\0b").tolist() == [97, 32, 98]


def test_bytes_and_text_encode_alike():
    text = "naïve 漢字"
    np.testing.assert_array_equal(
        ByteTokenizer().encode(text), ByteTokenizer().encode(text.encode())
    )


def test_decode_shows_ends_and_replaces_invalid_utf8():
    assert ByteTokenizer().decode([97, 0, 0xC3, 98]) == "a<|endoftext|>\ufffdb"


def test_decode_takes_numpy_ids():
    assert ByteTokenizer().decode(np.array([104, 105])) == "hi"


def test_a_lone_surrogate_does_not_fail():
    assert ByteTokenizer().encode("a\ud800").tolist() == [97, 63]


@given(st.lists(st.integers(0, 50_256)))
def test_numbers_encode_inverts_decode(ids):
    tokenizer = NumberTokenizer(50_257)
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids


@pytest.mark.parametrize("word", ["10", "-1", "x", "1.0", "²", "٣"])
def test_numbers_refuse_what_is_no_token(word):
    with pytest.raises(UserError, match="0 to 9"):
        NumberTokenizer(10).encode(f"3 {word}")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_decode_inverts_encode(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_bpe_tokens_are_longer_than_bytes_and_below_its_size(bpe):
    ids = bpe.encode(TEXTS[0])
    assert bpe.vocab_size <= 400
    assert ids.max() < bpe.vocab_size
    assert ids.size < len(TEXTS[0]) / 2


def test_a_text_that_spells_the_end_of_text_is_text(bpe):
    text = f"a{END_OF_TEXT}b"
    assert bpe.end_of_text not in bpe.encode(text)
    assert bpe.decode(bpe.encode(text)) == text


def test_decode_of_bpe_shows_ends(bpe):
    assert bpe.decode([*bpe.encode("a"), bpe.end_of_text]) == f"a{END_OF_TEXT}"


def test_bpe_is_the_same_whatever_process_learns_it(bpe):
    code = f"""from lockstep_gpt.data.tokenizer import make_tokenizer
print(make_tokenizer("bpe", 400, {TEXTS!r}).to_dict()["json"], end="")"""
    environment = {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert result.stdout.decode() == bpe.to_dict()["json"]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@given(texts=st.lists(UTF8_TEXT))
def test_documents_are_encoded_one_by_one_with_an_end_after_each(bpe, name, texts):
    tokenizer = {"bytes": ByteTokenizer(), "bpe": bpe}[name]
    expected = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts]
    ids = tokenizer.encode_documents([text.encode() for text in texts])
    assert ids.tolist() == [token for ids in expected for token in ids]


def test_a_nul_in_a_document_of_bytes_is_no_end():
    assert ByteTokenizer().encode_documents([b"a\0", b""]).tobytes() == b"a \0\0"


@given(st.lists(st.sampled_from(["word", "9", " ", "\n\n", "  x", "é", "'s", "...", "\t", "漢字"])))
def test_a_long_text_cut_in_pieces_keeps_its_tokens(bpe, words):
    text = " go ".join(words)
    whole = bpe.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 30)
        assert bpe.encode(text).tolist() == whole


@given(UTF8_TEXT.filter(bool))
def test_a_cut_leaves_two_valid_texts_and_the_first_has_something(text):
    data = (text + "x").encode()
    end = cut(data)
    assert 0 < end <= len(data)
    assert data[:end].decode() + data[end:].decode() == text + "x"


@pytest.fixture
def gpt2_files(tmp_path, bpe):
    """GPT-2's two files, as its own repository has them, of a small vocabulary."""
    model = json.loads(bpe.to_dict()["json"])["model"]
    vocabulary = {**model["vocab"]}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    return tmp_path


def test_a_vocabulary_and_its_merges_make_the_tokenizer_they_are_of(gpt2_files, bpe):
    loaded = make_tokenizer(str(gpt2_files), None, ())
    assert loaded.end_of_text == bpe.end_of_text
    for text in TEXTS:
        assert loaded.encode(text).tolist() == bpe.encode(text).tolist()


@pytest.mark.parametrize("place", ["tokenizer.json", ""])
def test_a_tokenizer_file_is_loaded_by_its_name_or_its_folder(tmp_path, bpe, place):
    (tmp_path / "tokenizer.json").write_text(bpe.to_dict()["json"])
    loaded = make_tokenizer(str(tmp_path / place), None, ())
    assert loaded.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()


def test_a_loaded_tokenizer_agrees_with_the_librarys_own(gpt2_files):
    loaded = make_tokenizer(str(gpt2_files), None, ())
    files = [str(gpt2_files / name) for name in ("vocab.json", "merges.txt")]
    reference = ByteLevelBPETokenizer(*files)
    for text in [*TEXTS, " a\n\n b", "don't", "\0"]:
        assert loaded.encode(text).tolist() == reference.encode(text).ids


def test_a_tokenizer_that_loses_something_is_refused(tmp_path, bpe):
    values = json.loads(bpe.to_dict()["json"])
    values["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, "pre_tokenizer": None}))
    with pytest.raises(UserError, match=r"data\.tokenizer=.* does not give back every text"):
        make_tokenizer(str(tmp_path), None, ())


def test_a_damaged_tokenizer_file_is_one_clear_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"data\.tokenizer=.* cannot be had \(.*; give bytes"):
        make_tokenizer(str(tmp_path), None, ())


def test_a_missing_library_is_named_with_the_command_that_installs_it():
    line = f"no_such is missing; pip install '{PROGRAM}[bpe]'"
    with pytest.raises(UserError, match=re.escape(line)):
        library("no_such", "bpe")


@pytest.mark.parametrize("kind", ["bytes", "numbers", "bpe"])
def test_a_tokenizer_survives_json(bpe, kind):
    made = {"bytes": ByteTokenizer(), "numbers": NumberTokenizer(1000), "bpe": bpe}[kind]
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert type(again) is type(made)
    assert again.to_dict() == made.to_dict()
    assert (again.vocab_size, again.end_of_text) == (made.vocab_size, made.end_of_text)
    assert again.encode("1 2").tolist() == made.encode("1 2").tolist()


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(UserError, match="'words' is not one of bytes, numbers, bpe"):
        from_dict({"kind": "words"})


@pytest.mark.parametrize(("vocab_size", "size"), [(2, 1), (256, 1), (257, 2), (65_536, 2)])
def test_ids_take_the_smallest_type(vocab_size, size):
    assert token_dtype(vocab_size).itemsize == size
