"""The shipped tasks: the same everywhere, with right answers, from text that is held out."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep_gpt.data.sources.source import split_of_name
from lockstep_gpt.data.sources.stdlib import StandardLibrary
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.builtin import builtin_tasks, held_out
from lockstep_gpt.extras.tasks.rows import tokenize_task

SMOKE = 32  # its context
PAIRS = {")": "(", "]": "[", "}": "{"}


def made(data=None):
    return {
        task.name: task for task in builtin_tasks(SimpleNamespace(data=data or StandardLibrary()))
    }


@pytest.fixture(scope="module")
def tasks():
    return made()


def right(example):
    return example.prompts[example.answer]


def balanced(text):
    opened = []
    for sign in text:
        if sign in PAIRS.values():
            opened.append(sign)
        if sign in PAIRS and (not opened or opened.pop() != PAIRS[sign]):
            return False
    return not opened


def test_they_are_the_same_each_time_and_enough_to_tell_models_apart(tasks):
    assert made() == tasks
    assert [*tasks] == ["add", "brackets", "calls", "copy", "lines"]
    assert all(len(task.examples) >= 100 for task in tasks.values())


def test_sums_are_right(tasks):
    for example in tasks["add"].examples:
        ((context, target),) = example.prompts
        for line in f"{context}{target}".splitlines():
            left, _, total = line.partition(" = ")
            assert sum(map(int, left.split(" + "))) == int(total)


def test_only_the_right_brackets_balance(tasks):
    for example in tasks["brackets"].examples:
        fits = [balanced(context + choice) for context, choice in example.prompts]
        assert fits == [place == example.answer for place in range(4)]


def test_only_the_right_copy_is_the_name_on_the_left(tasks):
    for example in tasks["copy"].examples:
        names = [f"self.{choice.strip()} = " in context for context, choice in example.prompts]
        assert names == [place == example.answer for place in range(4)]
        assert len({len(context) for context, _ in example.prompts}) == 1
        assert len({choice for _, choice in example.prompts}) == 1


def test_lines_and_calls_are_in_held_out_files_and_continue_them(tasks):
    texts = held_out(SimpleNamespace(data=StandardLibrary()))
    bare = [
        "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())
        for text in texts
    ]
    for example in tasks["lines"].examples:
        assert any("".join(right(example)) in text for text in bare)
        assert all(any(f"{choice}" in text for text in bare) for _, choice in example.prompts)
    for example in tasks["calls"].examples:
        assert any("".join(right(example)) in text for text in texts)


def test_no_text_is_from_a_file_that_a_run_trains_on():
    for fraction in (0.02, 0.05):
        data = StandardLibrary(val_fraction=fraction)
        texts = held_out(SimpleNamespace(data=data))
        for file in data.files:
            if split_of_name(file.name, fraction, 0) == "train" and file.size > 2000:
                text = Path(file.path).read_text(encoding="utf-8", errors="replace")
                assert text not in texts, file.name
        ast.parse(texts[0])


def test_a_run_on_other_data_uses_the_default_fraction():
    texts = held_out(SimpleNamespace(data=Text(val_fraction=0.5)))
    assert texts == held_out(SimpleNamespace(data=StandardLibrary()))


def test_a_fraction_that_holds_out_no_file_is_refused():
    with pytest.raises(UserError, match=r"data.val_fraction=1e-09 holds out no file .* name task"):
        held_out(SimpleNamespace(data=StandardLibrary(val_fraction=1e-9)))


def test_every_answer_fits_the_smallest_context_of_our_experiments(tasks):
    for task in tasks.values():
        rows = tokenize_task(task, ByteTokenizer(), SMOKE).rows
        assert max(len(row.ids) for example in rows for row in example) <= SMOKE + 1
