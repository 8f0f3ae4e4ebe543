"""Task files: what is accepted, and one line about anything else."""

import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.examples import read_task, read_tasks

QUESTION = {"context": "a", "choices": ["b", "c"], "answer": 0}
GOOD = {"context": "a", "target": "b"}
STOPPED = {**GOOD, "until": "\n"}

BAD = [
    ([b'{"context"'], "1: is not JSON (Expecting ':' delimiter at character 11); write one"),
    ([GOOD, b"", b"{"], "3: is not JSON"),
    ([b"[" * 100_000], "1: is nested too deeply; write one flat object per line"),
    ([b'{"answer": ' + b"1" * 5000 + b"}"], "1: has a number with too many digits; write a"),
    ([{**QUESTION, "choices": ["\ud800", "b"]}], "1: choices[0] has half of a surrogate pair"),
    ([b"\xff"], "1: is not UTF-8; save the file as UTF-8"),
    ([[1]], "1: is [1], not an object; write {...} on each line"),
    ([{}], "1: has the keys of nothing; give context, choices, answer; or context, target, until"),
    ([{"contxt": "a", "target": "b"}], "1: has the keys contxt, target; give"),
    ([{"context": "a", "answer": 0}], "1: has the keys answer, context; give"),
    ([{**QUESTION, "choices": []}], "1: choices=[] must be a list of at least 2 texts; add them"),
    ([{**QUESTION, "choices": ["b"]}], '1: choices=["b"] must be a list of at least 2 texts'),
    ([{**QUESTION, "choices": "bc"}], '1: choices="bc" must be a list of at least 2 texts'),
    ([{**QUESTION, "choices": ["b", ""]}], '1: choices[1]="" must be a text that is not empty'),
    ([{**QUESTION, "choices": ["b", 2]}], "1: choices[1]=2 must be a text that is not empty"),
    ([QUESTION, {**QUESTION, "answer": 2}], "2: answer=2 is not the index of a choice; use 0 to 1"),
    ([{**QUESTION, "answer": -1}], "1: answer=-1 is not the index of a choice; use 0 to 1"),
    ([{**QUESTION, "answer": True}], "1: answer=true is not the index of a choice; use 0 to 1"),
    ([{**QUESTION, "answer": "b"}], '1: answer="b" is not the index of a choice; use 0 to 1'),
    ([{**GOOD, "context": None}], "1: context=null is not text; put it in quotes"),
    ([{**GOOD, "target": ""}], '1: target="" must be a text that is not empty; write one'),
    (
        [{**STOPPED, "until": []}],
        '1: until=[] is not a stop; give a text such as "\\n", or several',
    ),
    ([{**STOPPED, "until": [""]}], '1: until="" must be a text that is not empty'),
    ([{**STOPPED, "until": "b"}], '1: until="b" is in the target; remove it from one of them'),
    ([GOOD, STOPPED], "2: is exact match, but the lines before are cloze; use a file for each"),
]


@pytest.mark.parametrize(("lines", "message"), BAD)
def test_a_bad_line_is_named_with_its_rule_and_remedy(write, lines, message):
    path = write("task.jsonl", lines)
    with pytest.raises(UserError) as error:
        read_task(path)
    assert str(error.value).startswith(f"{path}:{message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lines", [[], [b"", b"  "]])
def test_a_file_without_examples_is_refused(write, lines):
    path = write("task.jsonl", lines)
    with pytest.raises(UserError, match=r"has no examples; write one JSON object per line"):
        read_task(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match=f"{path} cannot be read: .*; name a task file"):
            read_task(path)


def test_two_files_of_one_name_would_share_a_column(write, tmp_path):
    (tmp_path / "other").mkdir()
    paths = [write("task.jsonl", [GOOD]), write("other/task.jsonl", [QUESTION])]
    with pytest.raises(UserError, match="two tasks are named task; rename one of the files"):
        read_tasks(map(str, paths))


def test_keys_tell_the_kind_of_a_task(files):
    tasks = read_tasks(files)
    assert [(task.name, task.kind, len(task.examples)) for task in tasks] == [
        ("pick", "multiple choice", 5),
        ("fill", "cloze", 3),
        ("sum", "exact match", 2),
    ]
    assert tasks[0].examples[2].prompts == (("x = ", "1\n"), ("x = ", "[1, 2]\n"))
    assert tasks[2].examples[1].until == ("\n", " ")


def test_the_fixed_order_has_each_example_once_and_is_always_the_same(write):
    path = write("task.jsonl", [{"context": str(number), "target": "x"} for number in range(50)])
    task = read_task(path)
    ordered = task.in_fixed_order()
    assert ordered == task.in_fixed_order()
    assert ordered.examples != task.examples
    assert {*ordered.examples} == {*task.examples}
    assert ordered.first(7).examples == ordered.examples[:7]
