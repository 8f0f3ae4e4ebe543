from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelSummary

from lockstep_gpt.config import Config
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.training import receipt
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.building import schedule_of
from lockstep_gpt.training.ending import summary_of_callbacks
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.receipt import (
    as_text,
    batchnorm_line,
    details_of_callbacks,
    receipt_lines,
)

FACTS = {"model": "many parameters", "devices": "2 x cpu, gloo"}
DETAILS = {"attention": "flash", "size": "1M"}


def lines(devices=2, nodes=1, compiled=False, epochs=0.5, micro_size=4, **optim):
    config = Config(
        max_steps=1000,
        run_name="first",
        run_dir="runs/first",
        compile=compiled,
        model=ModelConfig(block_size=64, n_layer=1, n_head=1, n_embd=8),
        trainer={"accelerator": "cpu"},
        batch=BatchConfig(micro_size=micro_size, global_size=48, reference_size=12),
        optim=OptimConfig(algorithm="adamw", lr=1e-3, warmup_steps=100, **optim),
    )
    batch = config.batch.build().spread_over(devices, nodes)
    return receipt_lines(config, batch, 64, schedule_of(config, batch), epochs, FACTS, DETAILS)


@pytest.mark.parametrize(
    ("changes", "accumulation", "copies"),
    [
        ({}, 2, False),
        ({"find_unused_parameters": True}, 1, False),
        ({"find_unused_parameters": True}, 2, True),
        ({"gradient_as_bucket_view": False}, 1, True),
    ],
)
def test_the_receipt_counts_buckets_that_are_a_second_copy(
    monkeypatch, changes, accumulation, copies
):
    monkeypatch.setattr(receipt, "backend_here", lambda: "gloo")
    shape = ModelConfig(block_size=64, n_layer=1, n_head=1, n_embd=8)
    parts = {"data": SimpleNamespace(_target_="mine.Data"), "model": shape}
    config = Config(max_steps=1, **parts, trainer={"accelerator": "cpu"}, strategy=changes)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(), world_size=2, accumulate_grad_batches=accumulation
    )
    model = SimpleNamespace(num_parameters=1, vocab_size=1)
    line = receipt.facts(config, model, None, trainer, "oneDNN")["strategy"]
    assert line.endswith(", plus memory for its buckets: 1 more gradient of all weights") == copies


def test_a_count_of_one_is_singular():
    assert " x 1 sample x " in lines(devices=48, micro_size=1)["batch"]


def test_the_arithmetic_of_the_batch_is_written_out():
    samples = "48 samples = 3,072 tokens per step"
    assert lines()["batch"] == f"2 devices x 1 node x 4 samples x 6 accumulation = {samples}"
    one = lines(devices=1, nodes=2)["batch"]
    assert one == f"1 device x 2 nodes x 4 samples x 6 accumulation = {samples}"


@pytest.mark.parametrize(
    ("windows", "epochs"),
    [(480_000, "0.1"), (48_000, "1"), (12_000, "4"), (11_999, "4"), (482, "100"), (231, "208")],
)
def test_the_receipt_shows_the_budget_in_steps_tokens_and_epochs(windows, epochs):
    unit = "epoch" if epochs == "1" else "epochs"
    budget = lines(epochs=48_000 / windows)["budget"]
    assert budget == f"1,000 steps = 3,072,000 tokens = {epochs} {unit}"


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("linear", "0.001 x 4 = 0.004 (linear in the batch: 48 samples, tuned for 12)"),
        ("sqrt", "0.001 x 2 = 0.002 (square root of the batch: 48 samples, tuned for 12)"),
        ("none", "0.001 x 1 = 0.001 (not scaled: 48 samples, tuned for 12)"),
    ],
)
def test_the_receipt_shows_the_factors_of_the_learning_rate(rule, line):
    assert lines(lr_scaling=rule)["lr"] == line


@pytest.mark.parametrize(
    ("decay", "end"),
    [
        ("cosine", ", cosine decay over the last 900 steps = 2,764,800 tokens to 0.0004"),
        ("wsd", ", wsd decay over the last 200 steps = 614,400 tokens to 0.0004"),
        ("constant", ", then constant"),
    ],
)
def test_the_receipt_shows_the_schedule_in_steps_and_tokens(decay, end):
    assert lines(decay=decay)["schedule"] == f"100 steps = 307,200 tokens of warmup{end}"


def test_the_facts_of_the_rank_and_of_callbacks_stand_between_ours():
    assert list(lines()) == [
        "run", "model", "devices", "precision", "batch", "sums", "attention", "size", "budget",
        "lr", "schedule",
    ]  # fmt: skip
    assert {**lines(), **FACTS, **DETAILS} == lines()
    assert lines()["run"] == "first in runs/first"
    assert lines(compiled=True)["precision"] == "32-true, compiled"


class WithLines(Callback):
    """A user's callback, which needs no base class of ours to be read."""

    def receipt_lines(self):
        return {"mine": "3 things"}

    def in_summary(self, step):
        return {"my_steps": step}


def test_any_callback_may_add_to_the_receipt_and_to_the_summary():
    trainer = SimpleNamespace(callbacks=[Callback(), WithLines(), ModelSummary()], global_step=7)
    assert details_of_callbacks(trainer) == {"mine": "3 things"}
    assert summary_of_callbacks(trainer) == {"my_steps": 7}


def test_the_text_is_two_columns():
    text = as_text({"lr": "1", "schedule": "2"})
    assert text.splitlines() == ["  lr        1", "  schedule  2"]


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (0, "trainer.sync_batchnorm=true changes nothing: the model has none"),
        (1, "1 layer synchronized over all ranks"),
        (2, "2 layers synchronized over all ranks"),
    ],
)
def test_the_receipt_says_what_sync_batchnorm_does(layers, line):
    norms = [torch.nn.BatchNorm1d(3) for _ in range(layers)]
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), *norms)
    synchronized = Config(max_steps=1, trainer={"sync_batchnorm": True})
    assert batchnorm_line(synchronized, model) == {"batchnorm": line}
    assert batchnorm_line(Config(max_steps=1), model) == {}
