import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens import byte_pairs as module
from lockstep.tokens.tokenizer import END_OF_TEXT
from lockstep.tokens.tokenizer_choice import make_tokenizer

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
    code = f"""from lockstep.tokens.tokenizer_choice import make_tokenizer
print(make_tokenizer("bpe", 400, {TEXTS!r}).to_dict()["json"], end="")"""
    environment = {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert result.stdout.decode() == bpe.to_dict()["json"]


PARTS = [
    "word",
    "9",
    " ",
    "\n\n",
    "  x",
    "é",
    "'s",
    "...",
    "\t",
    "漢字",
    "。",
    "\u3000",
    "don't",
    "_",
]


@given(st.lists(st.sampled_from(PARTS)), st.sampled_from(["", " go "]))
def test_a_long_text_cut_in_pieces_keeps_its_tokens(bpe, words, between):
    text = between.join(words)
    expected = bpe.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 30)
        assert bpe.encode(text).tolist() == expected


@pytest.mark.parametrize("text", ["漢字" * 50, "9" * 100, " " * 100, "\t \n" * 30, "'s" * 50])
def test_a_text_without_a_sure_place_is_cut_only_if_it_is_too_long(bpe, monkeypatch, text):
    monkeypatch.setattr(module, "PIECE", 30)
    assert list(module._pieces(text.encode())) == [text.encode()]
    monkeypatch.setattr(module, "LONGEST_PIECE", 60)
    pieces = [piece.decode() for piece in module._pieces(text.encode())]
    assert len(pieces) > 1
    assert "".join(pieces) == text
    assert bpe.decode(bpe.encode(text)) == text


@given(texts=st.lists(UTF8_TEXT))
def test_documents_are_encoded_one_by_one_with_an_end_after_each(bpe, texts):
    expected = [[*bpe.encode(text), bpe.end_of_text] for text in texts]
    ids = bpe.encode_documents([text.encode() for text in texts])
    assert ids.tolist() == [token for ids in expected for token in ids]
