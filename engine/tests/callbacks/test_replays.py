"""`callbacks=[default,replays]`: micro-batches computed again, on another rank, have equal bits."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lockstep.batch import Batch
from lockstep.callbacks.gradient_bits import refuse_changing_kernels
from lockstep.callbacks.replays import Replays, Vote, verdict
from lockstep.errors import UserError
from lockstep.strategies.placing import auto

NAMES = ["embedding", "block", "norm"]
RIGHT = (5, 4, 3, 2, 1)
TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
REPLAYS = ("callbacks=[default,replays]", "callbacks.replays.every=1")
SHORT = ("max_steps=6", "val_every=6", "checkpoint.every=6", "model.dropout=0.1")


def changed(place):
    return tuple(bits + (index == place) for index, bits in enumerate(RIGHT))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (0, "its batch"),
        (1, "the loss"),
        (2, "the gradient of embedding"),
        (4, "the gradient of norm"),
    ],
)
def test_what_was_computed_first_is_named(place, name):
    votes = [Vote(1, changed(place)), Vote(0, RIGHT), Vote(0, RIGHT), Vote(1, RIGHT)]
    assert verdict(votes, NAMES) == (
        f"has other bits when computed again, first in {name}; rank 1 got what 1 of 4 computations "
        "did: check that device"
    )


def test_backward_begins_at_the_last_tensor():
    wrong = (5, 4, 0, 0, 1)
    votes = [Vote(0, wrong), Vote(0, RIGHT), Vote(0, RIGHT)]
    assert "first in the gradient of block; rank 0 got what 1 of 3" in verdict(votes, NAMES)


def test_a_third_rank_decides_between_two_that_stay_with_their_bits():
    wrong = changed(3)
    votes = [Vote(1, wrong), Vote(0, RIGHT), Vote(0, RIGHT), Vote(1, wrong)]
    text = verdict(votes, NAMES)
    assert text.endswith("on rank 0; either rank may be wrong: check both devices")
    text = verdict([*votes, Vote(2, RIGHT)], NAMES)
    assert "; rank 1 got what 2 of 5 computations did" in text


def test_steps_are_random_and_about_one_in_n():
    due = [step for step in range(20_000) if Replays(10, seed=1337).is_due(step)]
    assert 1800 < len(due) < 2200
    gaps = {later - step for step, later in pairwise(due)}
    assert len(gaps) > 20


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clean_runs_have_the_same_bits_with_and_without_it(new_run, precision, accumulation):
    def train(*chosen):
        batch = {"micro_size": 4 // accumulation}
        run = new_run(precision=precision, batch=batch, model={"dropout": 0.1})
        settings = {} if precision == "16-mixed" else {"precision": precision}
        run.fit(*(make(1, run.config.seed) for make in chosen), **settings)
        return run.module.model.state_dict()

    plain = train()
    for name, weight in train(Replays).items():
        assert torch.equal(weight, plain[name])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_two_ranks_agree_while_they_accumulate(command):
    words = (*SHORT, *TWO, "batch.micro_size=2", "optim=muon")
    command.train(*words, *REPLAYS, "run_dir=verified")
    command.train(*words, "run_dir=plain")
    assert command.summary("verified")["weights"] == command.summary("plain")["weights"]


def test_a_batchnorm_is_refused(command):
    (command.folder / "normed.py").write_text(
        "import torch, lightning\n"
        "class Normed(lightning.Callback):\n"
        "    def setup(self, trainer, pl_module, stage):\n"
        "        pl_module.model.extra = torch.nn.BatchNorm1d(3)\n"
    )
    words = ("+callbacks.normed._target_=normed.Normed", *REPLAYS, "run_dir=run")
    result = command.train(*SHORT, *words, status=2, PYTHONPATH=str(command.folder))
    assert "the callback Replays computes micro-batches again, which would change" in result.stderr


def test_gpus_need_kernels_that_always_round_alike(new_run):
    def on_gpu(exact_micro_size):
        batch = Batch(global_size=4, exact_micro_size=exact_micro_size)
        trainer = SimpleNamespace(strategy=auto(batch=batch))
        modules = new_run().module.modules
        return SimpleNamespace(device=torch.device("cuda"), modules=modules, trainer=trainer)

    with pytest.raises(UserError, match=r"Replays needs kernels that always round alike; "):
        refuse_changing_kernels(on_gpu(None))
    refuse_changing_kernels(on_gpu(1))
