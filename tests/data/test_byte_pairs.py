import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from lockstep_gpt.config import UserError
from lockstep_gpt.data import byte_pairs as module
from lockstep_gpt.data.byte_pairs import make_tokenizer
from lockstep_gpt.data.tokenizer import END_OF_TEXT, from_dict

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


def test_bpe_is_the_same_in_any_process(bpe):
    code = f"""from lockstep_gpt.data.byte_pairs import make_tokenizer
print(make_tokenizer("bpe", 400, {TEXTS!r}).to_dict()["json"], end="")"""
    environment = {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert result.stdout.decode() == bpe.to_dict()["json"]


@given(st.lists(st.sampled_from(["word", "9", " ", "\n\n", "  x", "é", "'s", "...", "\t", "漢字"])))
def test_a_long_text_cut_in_pieces_keeps_its_tokens(bpe, words):
    text = " go ".join(words)
    whole = bpe.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 30)
        assert bpe.encode(text).tolist() == whole


@pytest.fixture
def gpt2_files(tmp_path, bpe):
    """GPT-2's two files, as in its own repository, with a small vocabulary."""
    model = json.loads(bpe.to_dict()["json"])["model"]
    vocabulary = {**model["vocab"]}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    return tmp_path


def test_a_vocabulary_and_merges_give_their_tokenizer(gpt2_files, bpe):
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
    reference = ByteLevelBPETokenizer.from_file(*files)
    for text in [*TEXTS, " a\n\n b", "don't", "\0"]:
        assert loaded.encode(text).tolist() == reference.encode(text).ids


def test_a_lossy_tokenizer_is_rejected(tmp_path, bpe):
    values = json.loads(bpe.to_dict()["json"])
    values["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, "pre_tokenizer": None}))
    with pytest.raises(UserError, match=r"data\.tokenizer=.* does not restore every text"):
        make_tokenizer(str(tmp_path), None, ())


def test_a_damaged_tokenizer_file_is_one_clear_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"data\.tokenizer=.* cannot be loaded \(.*; give bytes"):
        make_tokenizer(str(tmp_path), None, ())


@given(texts=st.lists(UTF8_TEXT))
def test_documents_are_encoded_one_by_one_with_an_end_after_each(bpe, texts):
    expected = [[*bpe.encode(text), bpe.end_of_text] for text in texts]
    ids = bpe.encode_documents([text.encode() for text in texts])
    assert ids.tolist() == [token for ids in expected for token in ids]


def test_a_tokenizer_survives_json(bpe):
    again = from_dict(json.loads(json.dumps(bpe.to_dict())))
    assert type(again) is type(bpe)
    assert again.to_dict() == bpe.to_dict()
    assert (again.vocab_size, again.end_of_text) == (bpe.vocab_size, bpe.end_of_text)
    assert again.encode("1 2").tolist() == bpe.encode("1 2").tolist()


def test_an_unknown_kind_is_rejected_by_name():
    with pytest.raises(UserError, match="'words' is not one of bytes, bpe, numbers"):
        from_dict({"kind": "words"})
