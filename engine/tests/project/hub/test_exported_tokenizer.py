"""Exported tokenizers give our ids for any text, and our text for any ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lockstep.errors import UserError
from lockstep.hub.tokenizer import as_files
from lockstep.tokens.tokenizer import END_OF_TEXT, ByteTokenizer

ENOUGH = 400  # examples
UTF8_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Ends of text, merges, and bytes that are not UTF-8 should be close together.
TEXT = st.lists(UTF8_TEXT | st.sampled_from([END_OF_TEXT, "\0", "  ", "return x"])).map("".join)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def both(request, shaped, folder_of):
    """Our tokenizer, and the one of transformers."""
    ours = ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")
    folder = folder_of(shaped(vocab_size=ours.vocab_size, n_layer=1), ours)
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@settings(max_examples=ENOUGH)
@given(text=TEXT)
def test_ids_of_any_text_are_ours(both, text):
    ours, theirs = both
    if ours.kind == "bytes":  # ours rejects a NUL, which theirs can't
        text = text.replace("\0", " ")
    assert theirs(text).input_ids == ours.encode(text).tolist()


@pytest.mark.slow
@settings(max_examples=ENOUGH)
@given(ids=st.lists(st.integers(0, 255) | st.just(0)))
def test_text_of_any_ids_is_ours(both, ids):
    ours, theirs = both
    assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.slow
@settings(max_examples=ENOUGH)
@given(text=TEXT.filter(lambda text: "\0" not in text))
def test_decode_inverts_encode(both, text):
    _, theirs = both
    assert theirs.decode(theirs(text).input_ids) == text


def test_ends_and_lengths_are_known(both):
    ours, theirs = both
    assert theirs.eos_token_id == ours.end_of_text
    assert theirs.eos_token == END_OF_TEXT
    assert (len(theirs), theirs.model_max_length) == (ours.vocab_size, 32)


def test_a_text_longer_than_a_piece_is_the_same(both):
    ours, theirs = both
    text = "def f(x): return x  # naïve 漢字\n" * 4000
    assert theirs(text, verbose=False).input_ids == ours.encode(text).tolist()


def test_another_kind_is_rejected():
    class Words(ByteTokenizer):
        kind = "words"

    with pytest.raises(UserError, match="kind 'words' is not one of bytes, numbers, bpe"):
        as_files(Words(), 8)
