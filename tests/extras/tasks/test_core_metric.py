"""CORE, on a folder that the test writes in the published layout."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
import yaml

from lockstep_gpt import cli
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.core_metric import core_tasks, read_core_task
from lockstep_gpt.extras.tasks.rows import tokenize_task

MC = [{"query": f"{n}?", "choices": ["yes", "no", "maybe"], "gold": n % 3} for n in range(6)]
SCHEMA = [
    {"context_options": [f"a{n}", f"bb{n}"], "continuation": "runs", "gold": n % 2}
    for n in range(4)
]
LM = [{"context": f"{text} ", "continuation": text[0]} for text in ("aaa", "bbb", "ccc")]
TASKS = {
    "asked": ("multiple_choice", MC, 2, "\nA: ", 33.3),
    "who": ("schema", SCHEMA, 0, " ", 50),
    "next": ("language_modeling", LM, 1, " ", 0),
}


@pytest.fixture
def core(tmp_path):
    """A folder with one task of each type."""
    folder = tmp_path / "core"
    (folder / "eval_data/sub").mkdir(parents=True)
    nodes, baselines = [], ["Eval Task,Random baseline"]
    for name, (kind, items, shots, delimiter, baseline) in TASKS.items():
        uri = f"sub/{name}.jsonl"
        lines = [json.dumps(item) for item in items]
        (folder / "eval_data" / uri).write_text("\n".join(lines))
        about = {"num_fewshot": [shots], "continuation_delimiter": delimiter}
        nodes.append({"label": name, "icl_task_type": kind, "dataset_uri": uri, **about})
        baselines.append(f"{name},{baseline}")
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": nodes}))
    (folder / "eval_meta_data.csv").write_text("\n".join(baselines))
    return folder


def shuffled(items):
    items = [*items]
    random.Random(1337).shuffle(items)
    return items


def losses(model, text, start):
    """The loss of each token from byte `start` on, after the end of a document."""
    ids = torch.tensor([[0, *text.encode()]][0])[-65:]
    logits = model(ids[None, :-1])[0].double()
    count = len(text.encode()) - start
    return F.cross_entropy(logits[-count:], ids[-count:], reduction="none"), logits[-count:]


@torch.no_grad()
def by_hand(model):
    """The accuracy of each task, one prompt at a time."""
    items, right = shuffled(MC), []
    for at, item in enumerate(items):
        others = [place for place in range(len(items)) if place != at]
        drawn = random.Random(1234 + at).sample(others, 2)
        solved = [
            f"{items[n]['query']}\nA: {items[n]['choices'][items[n]['gold']]}\n\n" for n in drawn
        ]
        task = f"{''.join(solved)}{item['query']}\nA: "
        means = [losses(model, task + text, len(task))[0].mean() for text in item["choices"]]
        right.append(int(torch.stack(means).argmin()) == item["gold"])
    results = {"asked": sum(right) / len(right)}
    right = []
    for item in shuffled(SCHEMA):  # what the prompts share begins with the digit
        texts = [f"{context} runs" for context in item["context_options"]]
        means = [losses(model, text, len(text) - 6)[0].mean() for text in texts]
        right.append(int(torch.stack(means).argmin()) == item["gold"])
    results["who"] = sum(right) / len(right)
    items, right = shuffled(LM), []
    for at, item in enumerate(items):
        others = [place for place in range(len(items)) if place != at]
        (drawn,) = random.Random(1234 + at).sample(others, 1)
        solved = f"{items[drawn]['context'].strip()} {items[drawn]['continuation']}\n\n"
        text = f"{solved}{item['context'].strip()}"
        _, logits = losses(model, f"{text} {item['continuation']}", len(text))
        right.append(bytes(logits.argmax(dim=-1).tolist()) == f" {item['continuation']}".encode())
    results["next"] = sum(right) / len(right)
    return results


def test_core_is_the_mean_of_centered_accuracies(core, trained, model, capsys):
    assert cli.main(["score", str(trained), "--core", str(core), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected, centered = by_hand(model), []
    assert [*result["tasks"]] == [*TASKS]
    for name, accuracy in expected.items():
        guessing = TASKS[name][-1] / 100
        centered.append((accuracy - guessing) / (1 - guessing))
        assert result["tasks"][name]["acc"] == accuracy
        assert result["tasks"][name]["centered"] == pytest.approx(centered[-1])
    assert result["core"] == pytest.approx(sum(centered) / 3)


def test_the_table_ends_with_core(core, trained, files, capsys):
    words = ["--core", str(core), "--tasks", files[1], "--limit", "2"]
    assert cli.main(["score", str(trained), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line[0] not in " /"] == [
        ["task", "examples"],
        ["fill", "2"],
        ["asked", "2"],
        ["who", "2"],
        ["next", "2"],
        ["CORE", "3"],
    ]


def test_all_files_of_core_are_read_before_the_first_is_scored(core, trained, capsys):
    (core / "eval_data/sub/next.jsonl").write_text("{")
    assert cli.main(["score", str(trained), "--core", str(core)]) == 2
    captured = capsys.readouterr()
    assert "next.jsonl:1: is not JSON" in captured.err
    assert captured.out == ""


def test_guessing_is_zero_and_perfection_one(core):
    task = core_tasks(core)[0]
    assert task.centered(0.333) == pytest.approx(0)
    assert task.centered(1) == 1


def test_solved_examples_come_before_the_question_and_are_never_the_question_itself(core):
    task = read_core_task(core_tasks(core)[0])
    for example, item in zip(task.examples, shuffled(MC), strict=True):
        context = example.prompts[0][0]
        assert context.count("\n\n") == 2
        assert context.endswith(f"\n\n{item['query']}\nA: ")
        assert context.count(item["query"]) == 1
    row = tokenize_task(task, ByteTokenizer(), 1000).rows[0][0]
    assert row.ids[0] == 0  # each prompt is a document


BREAK = {
    "core.yaml": [
        (None, "core.yaml cannot be read: No such file or directory; --core needs it"),
        ("a: [", "core.yaml is not YAML; download it again"),
        ("a: 1", "core.yaml has no list `icl_tasks`; download it again"),
        ("icl_tasks: [{label: a}]", "core.yaml has a task without a usable 'icl_task_type'"),
        (
            "icl_tasks: [{label: a, icl_task_type: b, dataset_uri: c, num_fewshot: 0}]",
            "core.yaml has a of type b, which is not one of multiple_choice, schema, language",
        ),
    ],
    "eval_meta_data.csv": [
        (None, "eval_meta_data.csv cannot be read"),
        ("Eval Task,Random baseline\n", "eval_meta_data.csv has no random baseline of asked; add"),
        ("Eval Task,Random baseline\nasked,100", "csv has a baseline of asked outside 0 to 100"),
    ],
    "eval_data/sub/asked.jsonl": [
        (None, "asked.jsonl cannot be read: No such file or directory; --core needs it"),
        ("", "asked.jsonl has 0 examples, too few for 2 solved ones before another"),
        ("{", "asked.jsonl:1: is not JSON (JSONDecodeError); download the file again"),
        ("{}", "asked.jsonl:1: lacks one of query, choices, gold, which multiple_choice needs"),
        (
            '{"query": "a", "choices": ["b"], "gold": 0}',
            "asked.jsonl:1: has no list of at least 2 texts to choose from; add them",
        ),
        (
            '{"query": "a", "choices": ["b", "c"], "gold": 2}',
            "asked.jsonl:1: gold=2 is not the index of a choice; use 0 to 1",
        ),
        (
            '{"query": 1, "choices": ["b", "c"], "gold": 1}',
            "asked.jsonl:1: query=1 is not text; put it in quotes",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "message"), [(n, *item) for n in BREAK for item in BREAK[n]]
)
def test_a_broken_folder_is_one_line(core, name, content, message):
    (core / name).unlink()
    if content is not None:
        (core / name).write_text(content)
    with pytest.raises(UserError) as error:
        read_core_task(core_tasks(core)[0])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
