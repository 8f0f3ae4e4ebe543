"""A task's numbers and their standard errors."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.tasks.examples import CHOICE, CLOZE, EXACT, Example, Task
from lockstep_gpt.extras.tasks.results import Number, mean, numbers_of
from lockstep_gpt.extras.tasks.rows import tokenize_task
from lockstep_gpt.extras.tasks.tables import columns_of, lines_of


def numbers(kind, examples, table, count=None):
    task = tokenize_task(Task("task", kind, tuple(examples)), ByteTokenizer(), 64)
    return numbers_of(task, count or len(examples), torch.tensor(table).double())


def test_length_changes_which_choice_is_the_best():
    example = Example((("a", "x"), ("a", "éé"), ("a", "xxx")), 1)
    table = [[-3.0, 0], [-4.0, 0], [-4.5, 0]]  # by character: 3, 2, 1.5; by byte: 3, 1, 1.5
    result = numbers(CHOICE, [example], table)
    assert {name: number.value for name, number in result.items()} == {
        "acc": 0,
        "acc_norm": 0,
        "acc_bytes": 1,
    }


def test_a_tie_is_the_first_choice_as_in_lm_eval():
    pair = (("a", "x"), ("a", "y"))
    result = numbers(CHOICE, [Example(pair, 0), Example(pair, 1)], 4 * [[-1.0, 0]])
    assert result["acc"].value == 0.5


def test_a_model_that_says_nan_is_never_right():
    pair = (("a", "x"), ("a", "y"))
    result = numbers(CHOICE, [Example(pair, 0)], [[math.nan, 0], [-1.0, 0]])
    assert result["acc"].value == 0
    result = numbers(CLOZE, [Example((("a", "x"),))], [[math.nan, 0]])
    assert math.isnan(result["perplexity"].value)


def test_perplexity_is_exp_of_the_mean_over_targets():
    examples = [Example((("a", text),)) for text in ("x", "xyz")]
    result = numbers(CLOZE, examples, [[-1.0, 1], [-3.0, 0]])
    assert (result["acc"], result["perplexity"].value) == (Number(0.5, 0.5), math.exp(2))
    assert result["perplexity"].error == pytest.approx(math.exp(2) * 1.0)
    assert numbers(CLOZE, examples, [[-1e9, 0], [-1e9, 0]])["perplexity"].value == math.exp(709)


def test_only_the_measured_examples_count():
    examples = [Example((("a", "x"),), until=("\n",)) for _ in range(4)]
    result = numbers(EXACT, examples, [[0, 1], [0, 0]], count=2)
    assert result == {"exact_match": Number(0.5, 0.5)}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.randoms())
def test_means_and_errors_are_the_textbook_s_in_any_order(values, draw):
    result = mean(values)
    assert result.value == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert result.error == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-6)
    draw.shuffle(values)
    assert mean(values) == result


def test_one_example_has_no_error():
    assert mean([0.5]) == Number(0.5, None)
    assert mean([math.inf, 1.0]).error is None


def test_columns_have_the_name_of_the_task_and_the_table_all_numbers():
    result = {
        "acc": Number(0.25, 0.1),
        "acc_norm": Number(0.5, None),
        "acc_bytes": Number(0.5, 0.1),
    }
    assert columns_of("pick", result) == {"tasks/pick": 0.25, "tasks/pick_acc_norm": 0.5}
    assert lines_of("pick", 6, 1200, result).splitlines() == [
        "pick       1,200  acc              0.2500 ± 0.1000",
        "                  acc_norm         0.5000",
        "                  acc_bytes        0.5000 ± 0.1000",
    ]
    assert columns_of("fill", {"acc": Number(1, 0), "perplexity": Number(9e9, 1e8)}) == {
        "tasks/fill": 1,
        "tasks/fill_perplexity": 9e9,
    }
    assert "9e+09 ± 1e+08" in lines_of("fill", 4, 2, {"perplexity": Number(9e9, 1e8)})
