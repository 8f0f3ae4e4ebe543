"""Tasks of lm-eval in files of this machine, of each kind that a callback measures."""

import json

import pytest

PROMPT = "doc_to_text: context"
KINDS = {
    "pick": f"""{PROMPT}
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "shots": f"""{PROMPT}
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
num_fewshot: 2
fewshot_split: test
metric_list: [{{metric: acc}}]
""",
    "fill": f"""{PROMPT}
output_type: loglikelihood
doc_to_target: target
metric_list: [{{metric: acc}}, {{metric: perplexity}}]
""",
    "roll": """doc_to_text: ""
output_type: loglikelihood_rolling
doc_to_target: target
metric_list: [{metric: bits_per_byte}]
""",
    "tell": f"""{PROMPT}
output_type: generate_until
doc_to_target: target
generation_kwargs: {{until: ["b"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


@pytest.fixture
def write_task(monkeypatch, tmp_path):
    """Return a function that writes a task of one of the kinds, and its examples.

    `datasets` is off the network, and its copies of files are out of the home.
    """
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def write(folder, name, rows):
        folder.mkdir(exist_ok=True)
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        common = [
            f"task: {name}",
            "dataset_path: json",
            f"dataset_kwargs: {{data_files: {{test: {data}}}}}",
            "test_split: test",
            'target_delimiter: ""',
        ]
        text = "\n".join([*common, KINDS[name]])
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")

    return write
