import json
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt import extras
from lockstep_gpt.config import PROGRAM, UserError
from lockstep_gpt.data import tokenizer as module
from lockstep_gpt.data.tokenizer import (
    ByteTokenizer,
    cut,
    from_dict,
    library,
    printable,
    token_dtype,
)

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
    end = cut(data)
    assert 0 < end <= len(data)
    assert data[:end].decode() + data[end:].decode() == text + "x"


def test_a_missing_library_is_named_with_the_command_that_installs_it():
    line = f"no_such is missing; pip install '{PROGRAM}[bpe]'"
    with pytest.raises(UserError, match=re.escape(line)):
        library("no_such", "bpe")


def test_a_tokenizer_survives_json():
    made = ByteTokenizer()
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert type(again) is type(made)
    assert again.to_dict() == made.to_dict()
    assert (again.vocab_size, again.end_of_text) == (made.vocab_size, made.end_of_text)
    assert again.encode("1 2").tolist() == made.encode("1 2").tolist()


@pytest.mark.parametrize("kind", ["words", "bpe", "numbers"])
def test_an_unknown_kind_is_rejected_by_name(monkeypatch, kind):
    monkeypatch.setattr(extras, "__path__", [])
    with pytest.raises(UserError, match=f"'{kind}' is not one of bytes; use the version"):
        from_dict({"kind": kind})


def test_an_extra_may_know_another_kind(monkeypatch):
    added = {"TOKENIZERS": {"words": "builtins:dict"}}
    monkeypatch.setattr(module, "merged", added.__getitem__)
    assert from_dict({"kind": "words", "size": 9}) == {"kind": "words", "size": 9}


@pytest.mark.parametrize(("vocab_size", "size"), [(2, 1), (256, 1), (257, 2), (65_536, 2)])
def test_ids_take_the_smallest_type(vocab_size, size):
    assert token_dtype(vocab_size).itemsize == size


@given(st.text())
def test_printable_text_replaces_only_control_characters(text):
    shown = printable(text)
    found = [each for each in text if unicodedata.category(each) == "Cc" and each not in "\t\n"]
    assert not any(each in shown for each in found)
    assert found or shown == text


def test_a_control_character_is_shown_by_its_number():
    assert printable("a\x1b[31m\r\x9b\tb\n") == "a\\x1b[31m\\x0d\\x9b\tb\n"
