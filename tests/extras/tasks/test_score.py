"""The command `score`."""

import json
import math

import pytest

from lockstep_gpt import cli
from lockstep_gpt.extras.tasks.results import Number
from lockstep_gpt.extras.tasks.score import as_values
from lockstep_gpt.extras.tasks.tables import format_value


def run_score(capsys, *words):
    assert cli.main(["score", *map(str, words)]) == 0
    return capsys.readouterr()


def test_the_table_and_json_have_the_same_numbers(trained, files, capsys):
    table = run_score(capsys, trained, "--tasks", *files)
    result = json.loads(run_score(capsys, trained, "--json", "--tasks", *files).out)
    assert result["checkpoint"] == table.out.splitlines()[0]
    assert [*result["tasks"]] == ["pick", "fill", "sum"]
    assert [result["tasks"][name]["examples"] for name in result["tasks"]] == [5, 3, 2]
    for numbers in result["tasks"].values():
        for name, value in numbers.items():
            if name != "examples" and not name.endswith("_stderr"):
                error = numbers[f"{name}_stderr"]
                assert f"{name:<11}  {format_value(value):>10} ± {format_value(error)}" in table.out
    assert "pick.jsonl:5: the first 38 tokens of the context are cut" in table.err


def test_the_shipped_tasks_are_the_default(trained, capsys):
    result = json.loads(run_score(capsys, trained, "--json", "--limit", 3).out)
    assert [*result["tasks"]] == ["add", "brackets", "calls", "copy", "lines"]
    assert {task["examples"] for task in result["tasks"].values()} == {3}


def test_shipped_tasks_and_files_can_be_scored_together(trained, files, capsys):
    result = json.loads(
        run_score(capsys, trained, "--json", "--limit", 2, "--tasks", "builtin", files[0]).out
    )
    assert [*result["tasks"]] == ["add", "brackets", "calls", "copy", "lines", "pick"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "none.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (["--limit", "0"], "--limit=0 must be at least 1"),
        (["--core", "none"], "none/core.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(trained, capsys, words, message):
    assert cli.main(["score", str(trained), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"lockstep-gpt score: {message}")
    assert captured.err.count("\n") == 1


def test_all_files_are_read_before_the_first_is_scored(trained, write, files, capsys):
    bad = write("bad.jsonl", [{"context": "a", "target": "b" * 99}])
    assert cli.main(["score", str(trained), "--tasks", *files, str(bad)]) == 2
    captured = capsys.readouterr()
    assert f"{bad}:1: 99 tokens to score are more than model.block_size=64" in captured.err
    assert captured.out == ""


def test_values_that_are_no_numbers_are_null_in_json():
    values = as_values(2, {"perplexity": Number(math.nan, None)})
    assert json.dumps(values, allow_nan=False)
    assert values == {"examples": 2, "perplexity": None, "perplexity_stderr": None}
