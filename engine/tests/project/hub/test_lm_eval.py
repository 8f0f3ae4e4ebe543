"""lm-evaluation-harness finds the same in an export as we do, and as a run finds with it."""

import json

import lightning
import pytest
import torch
import torch.nn.functional as F

from lockstep.evaluation.tasks import Tasks
from lockstep.tokens.tokenizer import ByteTokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other libraries

QUESTIONS = [
    {"question": "def f(x):", "choices": [" return", " café", "\n    pass"], "answer": 2},
    {"question": "import", "choices": [" os", " zzz", "?"], "answer": 0},
]
TASK = """
task: told
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
"""


@torch.inference_mode()
def likelihood(model, prompt, continuation):
    """The log-likelihood of `continuation` in nats, by our model and tokenizer."""
    encode = ByteTokenizer().encode
    ids = torch.tensor([*encode(prompt).tolist(), *encode(continuation).tolist()])
    logits = F.log_softmax(model(ids[None, :-1]).double(), dim=-1)[0]  # (T, V)
    count = len(encode(continuation))
    return logits[-count:].gather(1, ids[-count:, None]).sum().item()


def found_by_lm_eval(export, folder, *tasks):
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={export},trust_remote_code=True,dtype=float32",
        tasks=[*tasks],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )


def test_likelihoods_are_ours(pair, tmp_path, monkeypatch):
    model, folder = pair
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(item)}\n" for item in QUESTIONS), encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/told.yaml").write_text(TASK.format(file=file), encoding="utf-8")
    results = found_by_lm_eval(folder, tmp_path / "tasks", "told")
    right = 0
    for sample in results["samples"]["told"]:
        question = sample["doc"]
        ours = [likelihood(model, question["question"], item) for item in question["choices"]]
        theirs = [float(response[0][0]) for response in sample["resps"]]
        assert theirs == pytest.approx(ours, abs=1e-4)
        right += ours.index(max(ours)) == question["answer"]
    assert results["results"]["told"]["acc,none"] == right / len(QUESTIONS)


def continuations(model):
    """Return what continues some beginnings: the likeliest byte, and another one."""
    for prompt in ("def", "x = 1", "import os\nimport"):
        ids = torch.tensor(ByteTokenizer().encode(prompt))[None].long()
        order = [each for each in model(ids)[0, -1].argsort(descending=True).tolist() if each < 128]
        for target in (order[0], order[9]):
            yield {"context": prompt, "target": chr(target or 1)}


def test_a_run_finds_what_lm_eval_finds_in_its_export(pair, tmp_path, write_task):
    model, export = pair
    folder = tmp_path / "tasks"
    words = ["x", " yes", "été\n", " 1 + 1", "é", "return self"]
    picks = [
        {
            "context": "ab " * (n % 30) + f"{n}:" if n else "",
            "choices": [words[n % 6], words[(n + 1) % 6] + "!", words[(n + 3) % 6]],
            "answer": n % 3,
        }
        for n in range(40)
    ]
    write_task(folder, "pick", picks)
    write_task(folder, "fill", [*continuations(model)])
    write_task(folder, "roll", [{"target": json.dumps(picks[n])} for n in range(5)])
    names = ["pick", "fill", "roll"]
    theirs = found_by_lm_eval(export, folder, *names)["results"]
    module = lightning.LightningModule()
    module.model, module.validation_step = model, lambda _batch: None
    callback = Tasks(names, str(folder), batch_size=3, tokenizer=ByteTokenizer())
    settings = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": False}
    trainer = lightning.Trainer(callbacks=[callback], enable_checkpointing=False, **settings)
    trainer.validate(module, torch.utils.data.DataLoader([0]), verbose=False)
    ours = {name: value.item() for name, value in trainer.callback_metrics.items()}
    expected = {
        f"tasks/{name}/{key.removesuffix(',none')}": value
        for name in names
        for key, value in theirs[name].items()
        if key.endswith(",none") and "stderr" not in key
    }
    assert ours == pytest.approx(expected, rel=1e-4)
    assert 0 < ours["tasks/fill/acc"] < 1
    assert ours["tasks/pick/acc"] != ours["tasks/pick/acc_norm"]
