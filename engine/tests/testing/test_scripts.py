"""A check of any Lightning script: what it compares, what it says of a failure, what it refuses."""

import subprocess
import sys
import time

import pytest
import torch

from lockstep.errors import UserError
from lockstep.testing import assert_lockstep, scripts
from lockstep.testing.assertion import check
from lockstep.testing.experiment import FailedRunError
from lockstep.testing.watching import plain

SCRIPT = """
import argparse
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int)
parser.add_argument("--fail", type=int)
parser.add_argument("--by-rank", action="store_true")
options = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        if self.global_rank == options.fail and batch_idx:
            raise ArithmeticError(f"planted on rank {self.global_rank}")
        loss = self.layer(batch["x"]).square().mean()
        self.log("loss", loss.detach() + options.by_rank * self.global_rank, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


rows = torch.ones(64, 4, dtype=torch.float64)  # all samples are equal: ranks may take any
loader = DataLoader([{"x": row} for row in rows], batch_size=8 // options.devices)
torch.manual_seed(1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=options.devices, max_steps=7, logger=False, strategy="ddp",
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), loader)
"""
DEVICES = "--devices={ranks}"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["torchrun", "Lightning"])
def test_it_compares_what_torchrun_or_lightning_starts(starter, script):
    main = script if starter == "torchrun" else [sys.executable, script]
    lines = []
    results = check(main, [DEVICES], (1, 2), 1e-12, None, lines.append, steps=5)
    assert len(lines) == 2
    assert results.rows[0].keys() == {"trainer/step", "loss"}
    assert results.rows[0]["trainer/step"] == "5"
    names = ["state_dict.layer.bias", "state_dict.layer.weight"]
    assert sorted(name for name in results.state if name.startswith("state_dict")) == names
    assert "optimizer_states.0.state.0.exp_avg" in results.state


@pytest.mark.slow
def test_a_value_that_is_logged_by_rank_is_named(script):
    with pytest.raises(AssertionError) as failure:
        assert_lockstep(script, [DEVICES, "--by-rank"], ranks=(1, 2), tolerance=1e-12)
    text = str(failure.value)
    assert "2 ranks and 1 rank differ: 1 of 1 rows of the log" in text
    assert "loss of the log" in text
    assert "cause: a metric by rank" in text


@pytest.mark.slow
def test_a_failed_script_is_told_by_the_traceback_of_the_rank_that_failed(script):
    with pytest.raises(FailedRunError) as failure:
        assert_lockstep(script, [DEVICES, "--fail=1"], ranks=(2, 1), tolerance=1e-12)
    first, *log = str(failure.value).splitlines()
    assert first.startswith("the script on 2 ranks failed:")
    assert "ArithmeticError: planted on rank 1" in first
    assert any("raise ArithmeticError" in line for line in log)


@pytest.mark.slow
def test_copies_of_a_script_that_each_train_alone_are_not_compared(tmp_path):
    """torchrun starts them if the Trainer says how many devices it uses."""
    path = tmp_path / "train.py"
    path.write_text(
        SCRIPT.replace("devices=options.devices", "devices=1").replace('strategy="ddp",', "")
    )
    with pytest.raises(FailedRunError) as failure:
        assert_lockstep(str(path), [DEVICES], ranks=(1, 2))
    told = f"{path} is to train on 2 ranks, and its Trainer trains on 1, so nothing would be"
    assert str(failure.value).startswith(told)
    assert failure.value.status == 2


def test_an_object_in_a_scheduler_s_state_has_no_place_in_memory():
    """A warmup's state has the scheduler that follows, which is another object in each run."""
    following = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(each) for each in following]
    assert repr(schedulers[0]) != repr(schedulers[1])
    assert plain(schedulers[0]) == plain(schedulers[1])


def test_a_script_without_a_training_is_refused(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("print('nothing to train')\n")
    with pytest.raises(FailedRunError, match=r"no Trainer has trained a step; call Trainer.fit"):
        assert_lockstep(str(path), ranks=(1, 2))


@pytest.mark.parametrize("on_signal", ["SIG_DFL", "SIG_IGN"])  # as ranks that wait for others
def test_a_script_that_does_not_end_is_ended_with_its_processes(tmp_path, monkeypatch, on_signal):
    path = tmp_path / "endless.py"
    ignoring = f"import signal, time\nsignal.signal(signal.SIGTERM, signal.{on_signal})\n"
    path.write_text(f"{ignoring}time.sleep(600)\n")
    monkeypatch.setattr(scripts, "LIMIT", 6)
    began = time.monotonic()
    with pytest.raises(FailedRunError, match="had not ended after 6 s and was stopped"):
        assert_lockstep(str(path), ranks=(1, 2))
    assert time.monotonic() - began < 60
    command = ["ps", "-ww", "-eo", "args="]  # -ww: not cut to 80 columns
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(path) not in listing.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "64-true"}, "precision=64-true can't be set in .*let the script set it"),
        ({"kill_after": 2}, "kill_after=2 needs a run that continues by itself"),
    ],
)
def test_what_a_script_does_not_offer_is_refused(settings, message, script):
    with pytest.raises(UserError, match=message):
        assert_lockstep(script, [DEVICES], **settings)


def test_a_command_that_says_no_number_of_ranks_is_told_it_as_a_setting(script):
    with pytest.raises(FailedRunError, match=r"unrecognized arguments: .*trainer.devices=1"):
        assert_lockstep([sys.executable, script], ["--devices=2"], ranks=(1, 2))
