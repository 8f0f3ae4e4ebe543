"""lm-evaluation-harness finds the same numbers on the same files, in an export of the same run."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep_gpt import cli

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
if find_spec("lockstep_gpt.extras.hub") is None:
    pytest.skip("no such extra: hub", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other libraries

COMMON = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: context
target_delimiter: ""
"""
KINDS = {
    "pick": """
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
""",
    "fill": """
output_type: loglikelihood
doc_to_target: target
metric_list:
  - metric: acc
  - metric: perplexity
""",
    "sum": """
output_type: generate_until
doc_to_target: target
generation_kwargs: {{until: [{until}], max_gen_toks: 8, do_sample: false}}
metric_list:
  - metric: exact_match
""",
}
CLOSE = 1e-4


@pytest.fixture
def exported(trained, tmp_path):
    folder = tmp_path / "exported"
    assert cli.main(["export", str(trained), "--to", str(folder)]) == 0
    return folder


@pytest.fixture
def theirs(exported, tmp_path, monkeypatch):
    """Score a file with lm-eval."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def score(name, file, **about):
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        task = (COMMON + KINDS[name]).format(name=name, file=file, **about)
        (folder / f"{name}.yaml").write_text(task, encoding="utf-8")
        expected = lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={exported},trust_remote_code=True,dtype=float32",
            tasks=[name],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            device="cpu",
            batch_size=2,
            bootstrap_iters=0 if name == "fill" else 1,  # perplexity's error takes processes
        )
        return expected["results"][name]

    return score


def ours(capsys, trained, file):
    capsys.readouterr()
    assert cli.main(["score", str(trained), "--json", "--tasks", str(file)]) == 0
    return json.loads(capsys.readouterr().out)["tasks"][Path(file).stem]


def questions(count=80):
    """Examples on which a random model is sometimes right, with and without normalization."""
    words = ["x", " yes", "été\n", " 1 + 1", "é", "return self"]
    return [
        {
            "context": f"{'ab ' * (n % 30)}{n}:" if n else "",
            "choices": [words[n % 6], words[(n + 1) % 6] + "!", words[(n + 3) % 6]],
            "answer": n % 3,
        }
        for n in range(count)
    ]


def test_multiple_choice_is_the_same_with_errors(theirs, trained, write, capsys):
    file = write("pick.jsonl", questions())
    expected, actual = theirs("pick", file), ours(capsys, trained, file)
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert actual[name] == pytest.approx(expected[f"{name},none"], abs=CLOSE)
        assert actual[f"{name}_stderr"] == pytest.approx(expected[f"{name}_stderr,none"], abs=CLOSE)
    assert 0 < actual["acc"] < 1
    assert len({actual[name] for name in ("acc", "acc_norm", "acc_bytes")}) > 1


def test_cloze_is_the_same(theirs, trained, write, model, capsys):
    import torch

    likely = model.generate(torch.tensor([[*b"return "]]), 1, temperature=0)[0, -1].item()
    lines = [
        {"context": item["context"] or "a", "target": choice}
        for item in questions(20)
        for choice in item["choices"]
    ]
    if likely < 128:
        lines.append({"context": "return ", "target": chr(likely)})
    file = write("fill.jsonl", lines)
    expected, actual = theirs("fill", file), ours(capsys, trained, file)
    assert actual["acc"] == pytest.approx(expected["acc,none"], abs=CLOSE)
    assert actual["perplexity"] == pytest.approx(expected["perplexity,none"], rel=CLOSE)


def test_exact_match_is_the_same(theirs, trained, write, model, capsys):
    import torch

    from lockstep_gpt.data.tokenizer import ByteTokenizer

    prompt = torch.tensor([[*b"abc"]])
    text = ByteTokenizer().decode(model.generate(prompt, 6, temperature=0)[0, 3:].tolist())
    stop = text[-1]
    target = text[: text.index(stop)]
    lines = [{"context": "abc", "target": item, "until": stop} for item in (target or "x", "no")]
    file = write("sum.jsonl", lines)
    expected, actual = theirs("sum", file, until=json.dumps(stop)), ours(capsys, trained, file)
    assert actual["exact_match"] == pytest.approx(expected["exact_match,none"], abs=CLOSE)
    assert actual["exact_match"] == (0.5 if target else 0)


def test_shipped_tasks_are_the_same(theirs, trained, write, capsys):
    from types import SimpleNamespace

    from lockstep_gpt.data.sources.stdlib import StandardLibrary
    from lockstep_gpt.extras.tasks.builtin import builtin_tasks

    tasks = {task.name: task for task in builtin_tasks(SimpleNamespace(data=StandardLibrary()))}
    lines = [
        {
            "context": example.prompts[0][0],
            "choices": [choice for _, choice in example.prompts],
            "answer": example.answer,
        }
        for example in tasks["lines"].examples[:60]
    ]
    file = write("pick.jsonl", lines)
    expected, actual = theirs("pick", file), ours(capsys, trained, file)
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert actual[name] == pytest.approx(expected[f"{name},none"], abs=CLOSE)
