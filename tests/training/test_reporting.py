import logging
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelSummary

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.ranks import Ranks
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.reporting import (
    as_text,
    batchnorm_line,
    details,
    drop_rank_log,
    found,
    receipt,
    reporting,
    warn_of_sudden_rate,
)
from lockstep_gpt.training.schedule import plan_batch, plan_schedule

logger = logging.getLogger("lockstep_gpt.training.anything")


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Restore what a rank changes permanently in its process."""
    root, streams = logging.getLogger(), [os.dup(1), os.dup(2)]
    before, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("lightning", "torch", "fsspec")}
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    logging.captureWarnings(False)
    root.handlers = before
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)


def config(verbosity="normal"):
    return Config(max_steps=1, verbosity=verbosity)


def test_rank_zero_writes_the_same_to_screen_and_log(run, capsys):
    with reporting(run, Ranks(), config()) as terminal:
        logger.info("a line of %d words", 5)
        assert terminal is sys.stderr
    assert run.log.read_text() == capsys.readouterr().out == "a line of 5 words\n"


@pytest.mark.parametrize(
    ("verbosity", "heard"),
    [("quiet", "warning"), ("normal", "info warning"), ("debug", "debug info warning")],
)
def test_verbosity_selects_the_messages_shown(run, capsys, verbosity, heard):
    with reporting(run, Ranks(), config(verbosity)):
        for level in ("debug", "info", "warning"):
            getattr(logger, level)(level)
    assert capsys.readouterr().out.split() == heard.split()


@pytest.mark.filterwarnings("default")
def test_warnings_of_libraries_are_one_line_and_known_noise_is_dropped(run, capsys):
    with reporting(run, Ranks(), config()):
        warnings.warn("mind the step", stacklevel=1)
        warnings.warn(
            "The 'val_dataloader' does not have many workers which may be a bottleneck.",
            stacklevel=1,
        )
        logging.getLogger("lightning.pytorch").info("GPU available: False")
    assert capsys.readouterr().out == "warning: mind the step\n"


def test_logging_is_as_before_when_a_rank_has_ended(run):
    before = logging.getLogger().handlers[:]
    with reporting(run, Ranks(), config()):
        assert logging.getLogger().handlers != before
    assert logging.getLogger().handlers == before


def test_other_ranks_write_to_their_own_files(run, capfd):
    ranks = Ranks(rank=2, world_size=4)
    with reporting(run, ranks, config()) as terminal:
        logger.info("logged")
        os.write(1, b"printed by C++\n")
        os.write(2, b"and its errors\n")
        with terminal:
            print("the failure", file=terminal)
    log = run.rank_log(2).read_text()
    assert "printed by C++\nand its errors\n" in log
    assert not run.log.exists()
    out, err = capfd.readouterr()
    assert "printed" not in out + err
    assert err == "the failure\n"


def test_files_of_successful_ranks_and_then_their_folder_are_removed(run):
    for rank in (1, 2):
        run.rank_log(rank).parent.mkdir(exist_ok=True)
        run.rank_log(rank).touch()
    drop_rank_log(run, Ranks(rank=1))
    assert [path.name for path in run.rank_log(2).parent.iterdir()] == ["2.log"]
    drop_rank_log(run, Ranks(rank=2))
    assert not run.rank_log(2).parent.exists()


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
    batch = plan_batch(config.batch, 64, devices, nodes)
    return receipt(config, batch, plan_schedule(config, batch), epochs, FACTS, DETAILS)


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


class Told(Callback):
    """A user's callback, which needs no base class of ours to be asked."""

    def receipt_lines(self):
        return {"mine": "3 things"}

    def in_summary(self, step):
        return {"my_steps": step}


def test_any_callback_may_add_to_the_receipt_and_to_the_summary():
    trainer = SimpleNamespace(callbacks=[Callback(), Told(), ModelSummary()], global_step=7)
    assert details(trainer) == {"mine": "3 things"}
    assert found(trainer) == {"my_steps": 7}


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
    asked = Config(max_steps=1, trainer={"sync_batchnorm": True})
    assert batchnorm_line(asked, model) == {"batchnorm": line}
    assert batchnorm_line(Config(max_steps=1), model) == {}


@pytest.mark.parametrize(
    ("devices", "warmup", "rule", "times"),
    [
        (8, 0, "linear", "8"),
        (4, 0, "linear", "4"),
        (16, 0, "sqrt", "4"),
        (2, 0, "linear", ""),
        (8, 1, "linear", ""),
        (8, 0, "none", ""),
    ],
)
def test_a_rate_far_above_the_tuned_one_from_the_first_step_warns(
    caplog, devices, warmup, rule, times
):
    batch = BatchConfig(micro_size=2, reference_size=2)
    optim = OptimConfig(algorithm="adamw", warmup_steps=warmup, lr_scaling=rule)
    model = ModelConfig(block_size=8, n_layer=1, n_head=1, n_embd=8)
    config = Config(max_steps=9, batch=batch, optim=optim, model=model)
    warn_of_sudden_rate(plan_schedule(config, plan_batch(batch, 8, devices, 1)))
    warned = [line for line in caplog.messages if f"has {times} times the tuned" in line]
    assert (len(caplog.messages), len(warned)) == (bool(times), bool(times))
