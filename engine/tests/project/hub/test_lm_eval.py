"""lm-evaluation-harness loads an export, and finds the same likelihoods as we do."""

import json

import pytest
import torch
import torch.nn.functional as F

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


def test_likelihoods_are_ours(pair, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    model, folder = pair
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(item)}\n" for item in QUESTIONS), encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/told.yaml").write_text(TASK.format(file=file), encoding="utf-8")
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},trust_remote_code=True,dtype=float32",
        tasks=["told"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    right = 0
    for sample in results["samples"]["told"]:
        question = sample["doc"]
        ours = [likelihood(model, question["question"], item) for item in question["choices"]]
        theirs = [float(response[0][0]) for response in sample["resps"]]
        assert theirs == pytest.approx(ours, abs=1e-4)
        right += ours.index(max(ours)) == question["answer"]
    assert results["results"]["told"]["acc,none"] == right / len(QUESTIONS)
