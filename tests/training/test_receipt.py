import pytest

from lockstep_gpt.config import BatchConfig, Config, OptimConfig
from lockstep_gpt.training.receipt import as_text, receipt
from lockstep_gpt.training.schedule import plan_batch, plan_schedule

FACTS = {"model": "many parameters", "devices": "2 x cpu, gloo"}


def lines(devices=2, nodes=1, compiled=False, **optim):
    config = Config(
        max_steps=1000,
        run_name="first",
        run_dir="runs/first",
        compile=compiled,
        batch=BatchConfig(micro_size=4, global_size=48, reference_size=12),
        optim=OptimConfig(algorithm="adamw", lr=1e-3, warmup_steps=100, **optim),
    )
    batch = plan_batch(config.batch, 64, devices, nodes)
    return receipt(config, batch, plan_schedule(config, batch), FACTS)


def test_the_arithmetic_of_the_batch_is_written_out():
    samples = "48 samples = 3,072 tokens per step"
    assert lines()["batch"] == f"2 devices x 1 node x 4 samples x 6 accumulation = {samples}"
    one = lines(devices=1, nodes=2)["batch"]
    assert one == f"1 device x 2 nodes x 4 samples x 6 accumulation = {samples}"


def test_the_budget_is_said_in_steps_and_tokens():
    assert lines()["budget"] == "1,000 steps = 3,072,000 tokens"


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("linear", "0.001 x 4 = 0.004 (linear in the batch: 48 samples, found at 12)"),
        ("sqrt", "0.001 x 2 = 0.002 (square root of the batch: 48 samples, found at 12)"),
        ("none", "0.001 x 1 = 0.001 (not scaled: 48 samples, found at 12)"),
    ],
)
def test_the_learning_rate_is_said_with_what_made_it(rule, line):
    assert lines(lr_scaling=rule)["lr"] == line


@pytest.mark.parametrize(
    ("decay", "end"),
    [
        ("cosine", ", cosine decay over the last 900 steps = 2,764,800 tokens to 0.0004"),
        ("wsd", ", wsd decay over the last 200 steps = 614,400 tokens to 0.0004"),
        ("constant", ", then constant"),
    ],
)
def test_the_course_of_the_rate_is_said_in_steps_and_tokens(decay, end):
    assert lines(decay=decay)["schedule"] == f"100 steps = 307,200 tokens of warmup{end}"


def test_the_facts_of_the_rank_stand_between_ours():
    assert list(lines()) == [
        "run", "model", "devices", "precision", "batch", "budget", "lr", "schedule"
    ]  # fmt: skip
    assert lines()["run"] == "first in runs/first"
    assert lines(compiled=True)["precision"] == "32-true, compiled"


def test_the_text_is_two_columns():
    text = as_text({"lr": "1", "schedule": "2"})
    assert text.splitlines() == ["  lr        1", "  schedule  2"]
