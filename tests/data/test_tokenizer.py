import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.config import UserError
from lockstep_gpt.data.tokenizer import (
    ByteTokenizer,
    NumberTokenizer,
    from_dict,
    token_dtype,
)

UTF8_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


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


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NumberTokenizer(1000)])
def test_a_tokenizer_survives_json(tokenizer):
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert type(again) is type(tokenizer)
    assert again.to_dict() == tokenizer.to_dict()
    assert again.vocab_size == tokenizer.vocab_size


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(UserError, match="'bpe' is not one of bytes, numbers"):
        from_dict({"kind": "bpe"})


@pytest.mark.parametrize(("vocab_size", "size"), [(2, 1), (256, 1), (257, 2), (65_536, 2)])
def test_ids_take_the_smallest_type(vocab_size, size):
    assert token_dtype(vocab_size).itemsize == size
