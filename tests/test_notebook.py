"""Training from Python, as in a notebook: the command's numbers, with and without its files."""

import argparse
import math
import os
import re
import signal

import hydra
import lightning
import pytest

from lockstep_gpt.config_files import config_folder
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.compose import HYDRA_ARGUMENTS
from lockstep_gpt.notebook import SEVERAL_RANKS, build, compose

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
EXACT = "batch.exact_micro_size=2"
# Cells of a notebook in a real Jupyter kernel; each must print the same loss.
CELLS = (
    """
import json
from lockstep_gpt import cli
from lockstep_gpt.notebook import build, compose
module, data, trainer = build(compose(*words))
trainer.fit(module, data)
print("in the kernel:", float(trainer.callback_metrics["val/loss"]))
""",
    """
ranks = ["trainer=cpu", "trainer.devices=2", "strategy.process_group_backend=gloo"]
print("status", cli.main(["train", *words, *ranks, "run_dir=two"]))
print("on two ranks:", json.load(open("two/summary.json"))["val_loss"])
""",
)


class Interrupt(lightning.Callback):
    """Sends this process a Ctrl-C."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)


class Fail(lightning.Callback):
    """Fails in the first step."""

    def on_train_batch_end(self, *_):
        raise ZeroDivisionError("on purpose")


@pytest.fixture
def words(command, monkeypatch):
    """Return the overrides of a short run on shared data, in the command's folder."""
    monkeypatch.chdir(command.folder)
    return command.smoke(EXACT)[1:]


def loss_of(trainer):
    """Return the loss of the last validation, which Lightning keeps in single precision."""
    return trainer.callback_metrics["val/loss"].item()


@pytest.fixture
def expected(command):
    command.train(EXACT, "run_dir=expected")
    return command.summary("expected")["val_loss"]


@pytest.mark.slow
def test_three_lines_train_like_the_command_and_write_nothing(command, words, expected, capfd):
    before = {*command.folder.iterdir()}
    rate = "+callbacks.needs_logger._target_=lightning.pytorch.callbacks.LearningRateMonitor"
    config = compose(*words, rate)
    module, data, trainer = build(config)
    trainer.fit(module, data)
    assert loss_of(trainer) == pytest.approx(expected, rel=1e-7)
    assert "step 20/20  val_loss" in capfd.readouterr().out
    assert {*command.folder.iterdir()} == before
    module, data, trainer = build(compose(*words, "val_every=1000"))
    trainer.fit(module, data)
    assert loss_of(trainer) == pytest.approx(expected, rel=1e-7)


@pytest.mark.slow
def test_a_run_directory_has_what_the_command_writes(command, words, expected):
    module, data, trainer = build(compose(*words, "run_dir=run"))
    trainer.fit(module, data)
    summary = command.summary("run")
    assert (summary["status"], summary["val_loss"]) == ("done", expected)
    folders = [command.folder / name for name in ("expected", "run")]
    theirs, ours = ({path.name for path in folder.rglob("*")} for folder in folders)
    assert ours - {".lock"} == theirs - {".lock"}
    assert "schedule" in (command.folder / "run/train.log").read_text()
    command("train", "run_dir=run", "resume=auto", "max_steps=24", "launch.inline=true")
    assert command.summary("run")["step"] == 24


@pytest.mark.slow
@pytest.mark.parametrize("folder", [[], ["run_dir=run"]])
def test_a_validation_returns_its_loss_before_and_after_training_and_adds_no_row(
    command, words, folder
):
    module, data, trainer = build(compose(*words, *folder))
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    loss = loss_of(trainer)
    assert before["val/loss"] > loss
    expected = {"val/loss": loss, "val/perplexity": math.exp(loss)}
    rows = [path.read_text() for path in command.folder.glob("run/metrics.csv")]
    (after,) = trainer.validate(module, data, verbose=False)
    assert after == pytest.approx(expected)  # Lightning keeps them in single precision
    assert [path.read_text() for path in command.folder.glob("run/metrics.csv")] == rows


@pytest.mark.slow
@pytest.mark.parametrize("folder", [[], ["run_dir=run"]])
def test_a_test_returns_its_loss_and_adds_no_row(command, words, folder):
    text = ["data=text", f"data.source.path={argparse.__file__}", "data.source.test_fraction=0.1"]
    module, data, trainer = build(compose(*words, *text, *folder))
    trainer.fit(module, data)
    loss = loss_of(trainer)
    rows = [path.read_text() for path in command.folder.glob("run/metrics.csv")]
    (result,) = trainer.test(module, data, verbose=False)
    assert result["test/loss"] == pytest.approx(loss, abs=0.3)
    assert result["test/perplexity"] == pytest.approx(math.exp(result["test/loss"]))
    assert [path.read_text() for path in command.folder.glob("run/metrics.csv")] == rows


@pytest.mark.slow
def test_an_interrupt_saves_and_unlocks_a_run(command, words):
    handler = signal.getsignal(signal.SIGINT)
    module, data, trainer = build(compose(*words, "run_dir=run", "callbacks.sample=null"))
    trainer.callbacks.append(Interrupt())
    with pytest.raises(BaseException, match="stopped by SIGINT"):
        trainer.fit(module, data)
    assert command.summary("run")["status"] == "stopped"
    assert signal.getsignal(signal.SIGINT) == handler
    assert "step 8 is saved" in (command.folder / "run/train.log").read_text()
    command("train", "run_dir=run", "resume=auto", "launch.inline=true")
    assert command.summary("run")["step"] == 20


def test_a_failure_is_in_the_summary(command, words):
    module, data, trainer = build(compose(*words, "run_dir=run", "callbacks.sample=null"))
    trainer.callbacks.append(Fail())
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer.fit(module, data)
    assert command.summary("run")["status"] == "failed"


def test_hydra_composes_by_hand_even_while_the_command_composes_too(words):
    with hydra.initialize_config_dir(str(config_folder()), **HYDRA_ARGUMENTS):
        config = hydra.compose("train", overrides=["experiment=smoke", *words])
        assert compose(*words) == config
        module, _, trainer = build(hydra.compose("train", overrides=words))
    assert trainer.max_steps == 20
    assert module.model.block_size == 32


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.devices=2", SEVERAL_RANKS),
        ("resume=auto", "ckpt_path"),
        ("optim.lrr=1", "did you mean optim.lr"),
        ("--cfg=job", "leave out flags"),
    ],
)
def test_what_cannot_work_in_one_process_is_refused_in_one_line(words, override, line):
    with pytest.raises(UserError) as refusal:
        build(compose(*words, override))
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_argument_of_the_wrong_kind_is_answered_with_the_right_call():
    with pytest.raises(UserError) as refusal:
        compose(["experiment=smoke"])
    assert str(refusal.value) == (
        "compose(['experiment=smoke']): give each override as a text, as in "
        'compose("experiment=smoke", "optim.lr=1e-3")'
    )
    with pytest.raises(UserError) as refusal:
        build("experiment=smoke")
    line = """build('experiment=smoke'): write build(compose("experiment=smoke"))"""
    assert str(refusal.value) == line


@pytest.mark.slow
def test_a_jupyter_kernel_trains_here_and_on_two_ranks_with_equal_losses(
    command, words, expected, monkeypatch
):
    manager = pytest.importorskip("jupyter_client.manager", reason="needs dev.py install notebook")
    pytest.importorskip("ipykernel", reason="needs dev.py install notebook")
    monkeypatch.setenv("WANDB_MODE", "offline")
    printed = []

    def show(message):
        printed.append(message["content"].get("text") or str(message["content"]))

    kernel, client = manager.start_new_kernel(startup_timeout=240, cwd=str(command.folder))
    try:
        for cell in (f"words = {words}", *CELLS):
            reply = client.execute_interactive(cell, timeout=240, output_hook=show)
            assert reply["content"]["status"] == "ok", printed
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    text = "".join(printed)
    (shown,) = re.findall(r"in the kernel: ([\d.]+)", text)
    assert float(shown) == pytest.approx(expected, rel=1e-7)
    assert "status 0" in text
    assert f"on two ranks: {expected}" in text
