"""Runs of the real command with tasks."""

import csv
import json
import re

import pytest

PICK = [{"context": "aba", "choices": ["b", "cd", "ee"], "answer": 0} for _ in range(5)]


def test_a_text_too_long_for_the_model_ends_the_run_before_its_first_step(command, write):
    path = write("long.jsonl", [{"context": "a", "target": "b" * 40}])
    words = ("callbacks=[default,tasks]", f"callbacks.tasks.files=[{path}]", "run_dir=run")
    result = command.train(*words, status=2)
    assert f"{path}:1: 40 tokens to score are more than model.block_size=32" in result.stderr
    assert "Traceback" not in result.stderr
    assert not [*(command.folder / "run").glob("checkpoints/*.ckpt")]


@pytest.mark.slow
def test_a_run_with_tasks_shows_them_everywhere(command, write, read_offline):
    path = write("own.jsonl", PICK)
    settings = (f"callbacks.tasks.files=[builtin,{path}]", "callbacks.tasks.every=10")
    words = ("callbacks=[default,tasks]", *settings, "callbacks.tasks.share=null", "run_dir=run")
    out = command(*command.smoke("logger=wandb", "trainer=cpu", *words)).stdout
    assert "6 tasks with 905 examples, of which 905 every 10 steps, 905 at the end" in out
    assert re.search(r"^own +5  acc", out, re.MULTILINE)
    assert re.search(r"^tasks took \d+\.\d s of \d+ s$", out, re.MULTILINE)
    with (command.folder / "run/metrics.csv").open() as lines:
        rows = {int(row["trainer/step"]): row for row in csv.DictReader(lines)}
    summary = command.summary("run")
    assert all(0 <= float(rows[step]["tasks/lines"]) <= 1 for step in (10, 20))
    assert summary["tasks/lines"] == float(rows[20]["tasks/lines"])
    assert summary["tasks_seconds"] > 0
    _, _, logged = read_offline(command.folder / "run")
    values = {row["trainer/step"]: row["tasks/own"] for row in logged if "tasks/own" in row}
    assert values == {step: float(rows[step]["tasks/own"]) for step in (10, 20)}
    scores = json.loads(command("score", "run", "--json", "--tasks", str(path)).stdout)
    assert scores["tasks"]["own"]["acc"] == pytest.approx(float(rows[20]["tasks/own"]))


@pytest.mark.slow
def test_two_ranks_write_the_numbers_of_one(command, write):
    path = write("own.jsonl", [{"context": f"{n}", "target": f"{n}"[0]} for n in range(40)])
    settings = (
        "callbacks=[default,tasks]",
        f"callbacks.tasks.files=[{path}]",
        "callbacks.tasks.every=5",
    )
    words = (*settings, "callbacks.tasks.share=null", "batch.exact_micro_size=4", "trainer=cpu")
    tables = []
    for ranks in (1, 2):
        strategy = ("strategy=ddp", f"trainer.devices={ranks}") if ranks > 1 else ()
        command(*command.smoke(*words, *strategy, f"run_dir={ranks}"))
        with (command.folder / f"{ranks}/metrics.csv").open() as lines:
            tables.append(
                [[row[name] for name in row if "tasks/" in name] for row in csv.DictReader(lines)]
            )
    assert tables[0] == tables[1]
    assert any(any(row) for row in tables[0])


@pytest.mark.slow
def test_sharded_weights_are_measured_as_a_whole(command, files):
    settings = ("callbacks=[default,tasks]", f"callbacks.tasks.files=[{files[1]}]")
    words = (*settings, "callbacks.tasks.share=null", "trainer=cpu", "trainer.devices=2")
    command(*command.smoke(*words, "strategy=fsdp2", "run_dir=run"))
    summary = command.summary("run")
    scores = json.loads(command("score", "run", "--json", "--tasks", files[1]).stdout)
    assert summary["tasks/fill"] == scores["tasks"]["fill"]["acc"]
    likelihood = scores["tasks"]["fill"]["perplexity"]
    assert summary["tasks/fill_perplexity"] == pytest.approx(likelihood, rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(command, files):
    settings = ("callbacks=[default,tasks]", f"callbacks.tasks.files=[{files[1]}]")
    words = (*settings, "callbacks.tasks.every=5", "callbacks.tasks.share=0.5", "trainer=cpu")
    command(*command.smoke(*words, "optim.decay=constant", "run_dir=once"))
    command(*command.smoke(*words, "optim.decay=constant", "run_dir=other", "max_steps=10"))
    command("train", "run_dir=other", "resume=auto", "max_steps=20")
    tables = []
    for run in ("once", "other"):
        with (command.folder / run / "metrics.csv").open() as lines:
            rows = {
                row["trainer/step"]: row["tasks/fill_perplexity"] for row in csv.DictReader(lines)
            }
        tables.append({step: rows[step] for step in ("5", "15", "20")})
    assert tables[0] == tables[1]
