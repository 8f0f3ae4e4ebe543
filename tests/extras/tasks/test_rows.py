"""Rows: what is scored, what is cut, and how rows share batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.examples import CHOICE, CLOZE, EXACT, Example, Task
from lockstep_gpt.extras.tasks.rows import (
    BATCH_TOKENS,
    Row,
    batches,
    cut_line,
    tokenize_task,
)

END = 0  # ends a document


def rows_of(*prompts, kind=CLOZE, size=16, **about):
    task = Task("task", kind, (Example(prompts, where="file:7"),), **about)
    return tokenize_task(task, ByteTokenizer(), size).rows[0]


def texts_of(row):
    return bytes(row.ids[: row.start]), bytes(row.ids[row.start :])


class Merging(ByteTokenizer):
    """Merges ` a` into one token, as a byte-pair tokenizer would."""

    def encode(self, text):
        return super().encode(text.replace(" a", "\x01"))


TEXTS = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=9)


@given(TEXTS, TEXTS, st.integers(9, 30))
def test_a_row_ends_with_the_answer_and_fits_the_model(context, answer, size):
    (row,) = rows_of((context, answer), size=2 * size)
    text = (context + answer).encode()
    before, scored = texts_of(row)
    assert len(row.ids) - 1 <= 2 * size
    assert before + scored in (text, b"\0" + text)  # all spaces: nothing is before the answer
    assert scored.endswith(answer.encode())
    assert scored[: -len(answer)].decode().strip() == ""  # the spaces before the answer


def test_spaces_between_context_and_answer_are_scored_as_in_lm_eval():
    assert texts_of(*rows_of(("x = ", "a"))) == (b"x =", b" a")
    task = Task("task", CLOZE, (Example((("x =", " a"),)), Example((("x = ", "a"),))))
    ((one,), (other,)) = tokenize_task(task, Merging(), 16).rows
    assert one == other
    assert texts_of(one) == (b"x =", b"\x01")


def test_an_answer_that_a_tokenizer_merges_with_its_context_is_still_scored():
    class Joins(ByteTokenizer):
        def encode(self, text):
            return super().encode(text.replace("append", "\x01"))

    task = Task("task", CLOZE, (Example((("x.app", "end"),)),))
    ((row,),) = tokenize_task(task, Joins(), 16).rows
    assert texts_of(row) == (b"x.", b"\x01")


def test_an_empty_context_is_the_start_of_a_document():
    assert texts_of(*rows_of(("", "a"))) == (b"\0", b"a")
    (row,) = rows_of(("", "a"), kind=EXACT)
    assert row.ids == [END]


def test_the_beginning_of_a_long_context_is_cut_and_one_line_says_so():
    examples = tuple(
        Example(((text, "yz"),), where=f"file:{n}")
        for n, text in enumerate(["ab", "abcd", "abcde"])
    )
    task = Task("task", CLOZE, examples)
    ready = tokenize_task(task, ByteTokenizer(), 4)
    assert [texts_of(row) for (row,) in ready.rows] == [
        (b"ab", b"yz"),
        (b"bcd", b"yz"),
        (b"cde", b"yz"),
    ]
    assert cut_line(ready, 4) == (
        "file:1: the first 1 token of the context are cut to fit model.block_size=4; "
        "this concerns 2 of 3 examples"
    )
    assert cut_line(tokenize_task(task, ByteTokenizer(), 6), 6) == ""


def test_an_answer_that_the_model_cannot_read_is_refused():
    rows_of(("a", "x" * 16))
    with pytest.raises(UserError) as error:
        rows_of(("a", "x" * 17))
    assert str(error.value) == (
        "file:7: 17 tokens to score are more than model.block_size=16; shorten the text, or train "
        "with a larger block_size"
    )


def test_a_text_that_the_tokenizer_refuses_is_named_with_its_line():
    with pytest.raises(UserError, match=r"^file:7: a text contains a NUL byte"):
        rows_of(("a", "\0"))


def test_tokens_without_text_are_refused():
    class Numbers(ByteTokenizer):
        end_of_text = None

    with pytest.raises(UserError, match="tasks need text, which these tokens are not; train on"):
        tokenize_task(Task("task", CLOZE, ()), Numbers(), 16)


def test_core_scores_what_prompts_do_not_share_or_the_end_that_they_share():
    prompts = (("Q: ", "yes"), ("Q: ", "yesterday"), ("Q: ", "yell"))
    rows = rows_of(*prompts, kind=CHOICE, cut_at="prefix")
    assert [texts_of(row) for row in rows] == [
        (b"\0Q: ye", b"s"),
        (b"\0Q: ye", b"sterday"),
        (b"\0Q: ye", b"ll"),
    ]
    rows = rows_of(("he ", "ran"), ("she ", "ran"), kind=CHOICE, cut_at="suffix")
    assert [texts_of(row) for row in rows] == [(b"\0", b"he ran"), (b"\0s", b"he ran")]
    rows = rows_of(("no", "a"), ("no", "a"), kind=CHOICE, cut_at="prefix")
    assert {texts_of(row) for row in rows} == {
        (b"\0no", b"a")
    }  # equal prompts still have an answer
    assert texts_of(*rows_of(("Q: ", "a"), cut_at="document")) == (b"\0Q:", b" a")


@given(st.lists(st.integers(1, 700), max_size=60))
def test_each_row_is_in_one_batch_and_no_batch_is_too_large(lengths):
    rows = [Row([1] * (length + 1), 1) for length in lengths]
    groups = [*batches(rows)]
    assert sorted(place for batch in groups for place in batch) == [*range(len(rows))]
    for batch in groups:
        longest = max(len(rows[place].ids) for place in batch)
        assert len(batch) == 1 or len(batch) * longest <= BATCH_TOKENS
