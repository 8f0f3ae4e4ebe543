"""One flipped bit is found and named: while training, and afterward."""

import random

import pytest
import torch

from lockstep.checkpoints.reading import checkpoints_in, write_checkpoint
from lockstep.evidence.callbacks import flip

FLIP = "+callbacks.flip._target_=lockstep.evidence.callbacks.FlippedBit"
# After the callback that flips a bit, so that it sees what the model does.
TRACE = (
    "+callbacks.trace._target_=lockstep.callbacks.trace.Trace",
    "+callbacks.trace.every=2",
)
TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
REPLAYS = ("callbacks=[default,replays]", "callbacks.replays.every=1")
SHORT = ("max_steps=6", "val_every=6", "checkpoint.every=6", "model.dropout=0.1", "log_every=2")


def flipping(kind, rank=0):
    words = {"note": "note", "kind": kind, "step": 2, "rank": rank}
    return [FLIP, *(f"+callbacks.flip.{name}={value}" for name, value in words.items())]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("kind", "what"),
    [("gradient", "the gradient of "), ("token", "its batch"), ("weight", "the weights of ranks")],
)
def test_a_flipped_bit_on_one_rank_ends_the_run_and_is_named(command, kind, what):
    words = [*SHORT, *TWO, *flipping(kind, rank=1), *REPLAYS, "run_dir=run"]
    result = command.train(*words, status=1)
    line = result.stderr.splitlines()[-1]
    assert f"step 3: {'' if kind == 'weight' else 'micro-batch 1 of rank 1 '}" in line
    assert what in line
    if kind != "token":
        assert (command.folder / "note").read_text() in line
    if kind != "weight":
        assert "rank 1 got what 1 of 4 computations did" in line


def test_with_a_single_rank_replays_repeat_its_own(command):
    words = [*SHORT, *flipping("gradient"), *REPLAYS, "run_dir=run"]
    result = command.train(*words, status=1)
    name = (command.folder / "note").read_text()
    assert "step 3: micro-batch 1 of rank 0 has other bits when computed again, first in " in (
        result.stderr
    )
    assert f"the gradient of {name}; rank 0 got what 1 of 3 computations did" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("weight", "step 3: {}"),
        ("optimizer", "step 3: the optimizer's state of {}, before the step"),
        ("gradient", "step 3: the gradients of micro-batch 4 of 4 (rank 0), first of {}"),
        ("token", "step 3: {} of micro-batch 4 of 4 (rank 0)"),
    ],
)
def test_verify_names_the_step_and_the_place(command, kind, place):
    command.train(*SHORT, *flipping(kind), *TRACE, "batch.micro_size=2", "run_dir=run")
    result = command("verify", "run", status=1)
    line = result.stdout.splitlines()[-1]
    name = (command.folder / "note").read_text()
    assert line.startswith(f"different: {place.format(name)}")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_flipped_bit_in_a_checkpoint_with_a_fitting_checksum_is_named(command):
    command.train(*SHORT, "run_dir=run")
    assert "equal: all bits" in command("verify", "run").stdout
    path = checkpoints_in(command.folder / "run/checkpoints")[-1]
    content = torch.load(path, weights_only=True)
    weight = content["state_dict"]["model.final_norm.weight"]
    before = weight.clone()
    flip(weight, random.Random(3))
    number = int((weight != before).nonzero())
    write_checkpoint(content, path)
    result = command("verify", "run", status=1)
    assert "  hashes of weights    1 of 1 equal" in result.stdout  # of before the flip
    line = result.stdout.splitlines()[-1]
    name = "different: in the state saved after step 6, model.final_norm.weight differs in number"
    assert line.startswith(f"{name} {number} of 32, bit ")
