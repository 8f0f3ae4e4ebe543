import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.tokens import tokenizer as module
from lockstep.tokens.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    GrowingText,
    NumberTokenizer,
    find_cut,
    find_sure_cut,
    printable,
    token_dtype,
)
from lockstep.tokens.tokenizer_choice import make_tokenizer

ROOT = Path(__file__).resolve().parents[3]
UTF8_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(UTF8_TEXT)
def test_bytes_decode_inverts_encode(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text() | st.binary())
def test_encoded_text_never_contains_the_end_of_text(text):
    if "\0" in text if isinstance(text, str) else b"\0" in text:
        with pytest.raises(
            UserError, match="contains a NUL byte, which marks the end of a document"
        ):
            ByteTokenizer().encode(text)
    else:
        assert ByteTokenizer.end_of_text not in ByteTokenizer().encode(text)


def test_bytes_and_text_have_the_same_encoding():
    text = "naïve 漢字"
    np.testing.assert_array_equal(
        ByteTokenizer().encode(text), ByteTokenizer().encode(text.encode())
    )


def test_decode_shows_ends_and_replaces_invalid_utf8():
    assert ByteTokenizer().decode([97, 0, 0xC3, 98]) == "a<|endoftext|>\ufffdb"


def test_decode_accepts_numpy_ids():
    assert ByteTokenizer().decode(np.array([104, 105])) == "hi"


def test_a_lone_surrogate_does_not_fail():
    assert ByteTokenizer().encode("a\ud800").tolist() == [97, 63]


@given(texts=st.lists(UTF8_TEXT))
def test_documents_are_encoded_one_by_one_with_an_end_after_each(texts):
    tokenizer = ByteTokenizer()
    expected = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts]
    ids = tokenizer.encode_documents([text.encode() for text in texts])
    assert ids.tolist() == [token for ids in expected for token in ids]


def test_a_nul_in_a_document_is_rejected_with_its_text():
    with pytest.raises(UserError, match=r"a text contains a NUL byte.* remove it from b'a.x00'$"):
        ByteTokenizer().encode_documents([b"b", b"a\0", b""])


@given(UTF8_TEXT.filter(bool))
def test_a_cut_gives_two_valid_texts_and_the_first_is_not_empty(text):
    data = (text + "x").encode()
    end = find_cut(data)
    assert 0 < end <= len(data)
    assert data[:end].decode() + data[end:].decode() == text + "x"


@given(text=st.text(st.sampled_from("a9. \n\t漢。é\u3000'"), max_size=40))
def test_a_sure_cut_is_before_a_space_or_between_a_letter_and_punctuation(text):
    data = text.encode()
    end = find_sure_cut(data)
    before, after = data[:end].decode(), data[end:].decode()
    assert before + after == text
    if end:
        assert not before[-1].isspace()
        assert after[0] == " " or (before[-1].isalnum() and after[0] in "\n。")


def test_there_is_no_sure_cut_within_a_word_numbers_or_white_space():
    for text in ("漢字" * 9, "123456", " \n \n", "don't", "...", "a", ""):
        assert find_sure_cut(text.encode()) == 0, text


def test_a_sure_cut_ignores_an_incomplete_character():
    assert find_sure_cut("漢。字".encode()[:-1]) == len("漢".encode())


@pytest.mark.parametrize(("vocab_size", "size"), [(2, 1), (256, 1), (257, 2), (65_536, 2)])
def test_ids_take_the_smallest_type(vocab_size, size):
    assert token_dtype(vocab_size).itemsize == size


@given(st.text())
def test_printable_text_replaces_only_control_characters(text):
    escaped = printable(text)
    controls = [
        character
        for character in text
        if unicodedata.category(character) == "Cc" and character not in "\t\n"
    ]
    assert not any(character in escaped for character in controls)
    assert controls or escaped == text


def test_a_control_character_is_shown_by_its_number():
    assert printable("a\x1b[31m\r\x9b\tb\n") == "a\\x1b[31m\\x0d\\x9b\tb\n"


@given(st.lists(st.integers(1, 255), min_size=1, max_size=20))
def test_texts_of_growing_tokens_add_up_to_the_text_of_all(ids):
    for tokenizer in (ByteTokenizer(), NumberTokenizer(256)):  # the latter joins words by spaces
        growing = GrowingText(tokenizer)
        pieces = [growing.add([token]) for token in ids]
        assert "".join([*pieces, growing.end()]) == tokenizer.decode(ids)


def test_a_character_is_shown_when_it_is_whole():
    growing = GrowingText(ByteTokenizer())
    ids = [*"a\u20ac".encode(), 0xE2, 0x82]
    assert [growing.add([token]) for token in ids] == ["a", "", "", "\u20ac", "", ""]
    assert growing.end() == "\ufffd"


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
def test_bpe_encodes_documents_one_by_one_with_an_end_after_each(bpe, texts):
    expected = [[*bpe.encode(text), bpe.end_of_text] for text in texts]
    ids = bpe.encode_documents([text.encode() for text in texts])
    assert ids.tolist() == [token for ids in expected for token in ids]
