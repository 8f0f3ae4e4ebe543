"""Replicas that differ and steps that don't end: both end the run."""

import json
import os
import re
from pathlib import Path

import lightning
import pytest
import torch
from lightning import Callback

from lockstep.callbacks.guards import Guards, refuse_differing_replicas
from lockstep.errors import RunError
from lockstep.strategies import placing as strategies

TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")


def flipped(odd):
    """Return the message of `refuse_differing_replicas` after a bit flip on rank `odd`."""

    def check(rank):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2).double())
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        refuse_differing_replicas(model, 6)
        if rank == odd:
            model[1].weight.data.view(torch.int64)[1, 2] ^= 1
        try:
            refuse_differing_replicas(model, 7)
        except RunError as error:
            return str(error)
        return None

    return check


@pytest.mark.parametrize(("ranks", "named"), [(3, "on rank 1;"), (2, "on rank 0 and 1;")])
def test_one_flipped_bit_in_a_replica_is_found_by_all(on_ranks, ranks, named):
    messages = on_ranks(ranks, flipped(1))
    assert len(set(messages)) == 1
    assert "step 7: the weights of ranks differ, first in 1.weight," in messages[0]
    assert named in messages[0]


def test_equal_replicas_pass(on_ranks):
    assert on_ranks(2, flipped(None)) == [None, None]


FLIPPING = """
import lightning, torch
class Flipping(lightning.Callback):
    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            pl_module.model.final_norm.weight.data.view(torch.int32)[0] ^= 1
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(("every", "step"), [("4", 4), ("null", 5)])
def test_replicas_are_compared_periodically_and_before_each_save(command, every, step):
    (command.folder / "flipping.py").write_text(FLIPPING)
    words = (f"guard.replicas_every={every}", "checkpoint.every=5", "val_every=50", "run_dir=run")
    flipping = "+callbacks.flipping._target_=flipping.Flipping"
    result = command.train(*TWO, *words, flipping, status=1, PYTHONPATH=str(command.folder))
    assert f"step {step}: the weights of ranks differ, first in " in result.stderr
    assert not [*(command.folder / "run").glob("checkpoints/*.ckpt")]


HANGING = """
import time, lightning
class Hanging(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_run_that_makes_no_step_shows_the_stack_of_every_rank_and_ends(command, processes_of):
    (command.folder / "hanging.py").write_text(HANGING)
    words = ("+callbacks.hanging._target_=hanging.Hanging", "guard.stall_after=4", "run_dir=run")
    result = command.train(*TWO, *words, status=1, PYTHONPATH=str(command.folder))
    for rank in (0, 1):
        assert f"rank {rank}: no step for 4 s (guard.stall_after); its stack:" in result.stderr
    assert "in on_train_batch_start" in result.stderr
    lines = result.stderr.splitlines()
    line = r"rank \d: no step for 4 s \(guard.stall_after\); nothing is saved; to start over: .*"
    assert re.fullmatch(line, lines[-1])
    assert "in on_train_batch_start" in (command.folder / "run/ranks/1.log").read_text()
    assert json.loads((command.folder / "run/failed.json").read_text())["status"] == 1
    assert not processes_of(command.folder / "run")


class Foreign(lightning.LightningModule):
    """A plain module that knows nothing of this project."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)

    def training_step(self, batch, _index):
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Flip(Callback):
    """Changes a weight on one rank after a step, where nobody sees it."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step and trainer.global_rank == 1:
            pl_module.net.weight.data[0, 0] += 1


def foreign_run(*callbacks, **settings):
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks],
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    rows = [{"x": row} for row in torch.ones(40, 3)]
    trainer.fit(Foreign(), torch.utils.data.DataLoader(rows, batch_size=2))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders
def test_a_replica_of_any_module_is_compared(on_ranks):
    def fit(_rank):
        os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        ddp = strategies.ddp(process_group_backend="gloo", timeout_seconds=60)
        guards = Guards(replicas_every=2, stall_after=None)
        try:
            foreign_run(Flip(3), guards, strategy=ddp, devices=2)
        except RunError as error:
            return str(error)
        return None

    for line in on_ranks(2, fit):
        assert line.startswith("step 4: the weights of ranks differ, first in net.weight, on rank")


STALLED = """
import time, warnings
warnings.simplefilter("ignore")
from lightning import Callback
from test_guards import foreign_run
from lockstep.callbacks.guards import Guards

class Hang(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3:
            time.sleep(600)

foreign_run(Guards(stall_after=1), Hang())
"""


@pytest.mark.slow
def test_a_stall_in_any_trainer_shows_the_stack_and_ends(command):
    process = command.start_python("-c", STALLED, PYTHONPATH=str(Path(__file__).parent))
    _, output = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "rank 0: no step for 1 s (guard.stall_after); its stack:" in output
    assert "in on_train_batch_start" in output
