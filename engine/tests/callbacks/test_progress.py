import contextlib
import logging
import os
import re
import sys
import termios
from types import SimpleNamespace

import pytest
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lockstep.callbacks.progress import Progress
from lockstep.errors import UserError
from lockstep.metrics.callback import Metrics

LINE = (
    r"step (\d)/7  loss \d\.\d{4}  lr \d\.\d\de[+-]\d\d  "
    r"[\d.]+[kMG]? tok/s  data \d+%  \d+ s left"
)
VALIDATION = r"step (\d)/7  val_loss \d\.\d{4}"


def fit(run, progress):
    run.fit(run.metrics(run.config.log_every), progress)


@pytest.fixture
def run(new_run, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    return new_run(max_steps=7, val_every=3, log_every=2)


def steps(pattern, messages):
    matches = [re.fullmatch(pattern, message) for message in messages]
    return [int(match[1]) for match in matches if match]


def our_messages(caplog):
    package = "lockstep"
    return [record.message for record in caplog.records if record.name.startswith(package)]


def test_without_a_terminal_each_logged_step_and_validation_has_a_line(run, caplog):
    fit(run, Progress(line_seconds=0))
    messages = our_messages(caplog)
    assert steps(LINE, messages) == [2, 4, 6, 7]
    assert steps(VALIDATION, messages) == [3, 6]
    assert len(messages) == 6


def test_lines_keep_their_distance_but_the_last_step_always_has_one(run, caplog):
    fit(run, Progress(line_seconds=60))
    assert steps(LINE, our_messages(caplog)) == [7]


class Plain(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("train/loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set")
def test_a_plain_trainer_shows_steps_of_its_epochs_or_without_an_end(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    common = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    common |= {"default_root_dir": tmp_path, "enable_progress_bar": False}
    for arguments in ({"max_epochs": 2, "limit_train_batches": 4}, {"max_steps": 2}):
        parts = [Metrics(every=2), Progress(line_seconds=0)]
        Trainer(**common, **arguments, callbacks=parts).fit(Plain())
    lines = [line.partition("  ")[0] for line in our_messages(caplog) if line[:4] == "step"]
    assert lines == ["step 2/8", "step 4/8", "step 6/8", "step 8/8", "step 2/2"]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_without_the_metrics_that_it_shows_it_names_them(tmp_path):
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[Progress()])
    with pytest.raises(UserError, match=r"Progress needs lockstep\.Metrics among"):
        trainer.fit(Plain())


@contextlib.contextmanager
def terminal(monkeypatch):
    """Make standard error a terminal; return a function that reads its screen."""
    screen, line = os.openpty()
    os.set_blocking(screen, False)
    termios.tcsetwinsize(line, (24, 120))

    def read():
        screen_text = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                screen_text += os.read(screen, 4096)
        return screen_text.decode()

    with os.fdopen(line, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield read
    os.close(screen)


def test_a_terminal_gets_a_bar_and_no_lines(run, caplog, monkeypatch):
    with terminal(monkeypatch) as read:
        fit(run, Progress())
        screen_text = read()
    assert "| 7/7 [" in screen_text
    assert re.search(r"loss \d\.\d{4}", screen_text)
    assert steps(LINE, our_messages(caplog)) == []


def test_quiet_shows_no_bar(run, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "lockstep")
    with terminal(monkeypatch) as read:
        fit(run, Progress())
        assert read() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.50"),
        (999, "999"),
        (999.9, "1.00k"),
        (12_345, "12.3k"),
        (999_960, "1.00M"),
        (2.5e9, "2.50G"),
    ],
)
def test_speeds_are_written_with_three_digits_and_a_unit(value, text):
    progress = Progress()
    row = {"throughput/tokens_per_second": value, "train/loss": 1, "optim/lr": 1}
    progress._metrics = SimpleNamespace(row={**row, "data/wait_share": 0})
    assert f"  {text} tok/s" in progress._values(SimpleNamespace(progress_bar_metrics={}))
