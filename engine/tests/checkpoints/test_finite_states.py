"""No state is kept whose weights or moments are infinite or not a number."""

import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Callback
from torch import nn

from lockstep import stop_signals
from lockstep.callbacks.stopping import GracefulStop
from lockstep.checkpoints.finite_states import first_broken, own_part
from lockstep.checkpoints.reading import checkpoints_in, newest_valid, step_of
from lockstep.errors import RunError
from lockstep.memory import files
from lockstep.memory.callback import StateInMemory
from lockstep.memory.files import identity_of, states_in
from lockstep.run.directory import RunDirectory
from lockstep.run.run import Run
from lockstep.strategies import placing as strategies

BROKEN = [float("nan"), float("inf"), float("-inf")]
DDP = {"process_group_backend": "gloo", "timeout_seconds": 60, "comm_hook": "none"}
FSDP2 = {
    "process_group_backend": None,
    "timeout_seconds": 60,
    "reshard_after_forward": True,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "save_parts": False,
}


class Model(nn.Module):
    """Weights of several types, and a mask that is infinite on purpose."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, 4))
        self.halves = nn.Parameter(torch.full((70_000,), 2.0, dtype=torch.float16))
        self.tiny = nn.Parameter(torch.ones(5).to(torch.float8_e5m2), requires_grad=False)
        self.phases = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.large = nn.Parameter(torch.full((9,), 3e38))  # their sum is infinite
        self.counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.last = nn.Parameter(torch.zeros(()))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))


def test_finite_weights_are_found_to_be_finite():
    assert first_broken(Model(), []) is None
    assert first_broken(nn.ReLU(), []) is None


@pytest.mark.parametrize("number", BROKEN)
@pytest.mark.parametrize("name", ["first", "halves", "tiny", "phases", "large", "last"])
def test_a_weight_that_is_not_finite_is_named(name, number):
    model = Model()
    weight = getattr(model, name)
    with torch.no_grad():
        weight.view(-1)[-1:] = torch.full((1,), number).to(weight.dtype)
    assert first_broken(model, []).what == name


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_exactly_the_states_with_such_a_number_are_broken(values):
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values))
    is_broken = first_broken(model, []) is not None
    assert is_broken == (not torch.tensor(values).isfinite().all())


@pytest.mark.parametrize("number", BROKEN)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_a_moment_that_is_not_finite_is_named_with_its_weight(kind, number):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert first_broken(model, [optimizer]) is None
    key = [key for key, value in optimizer.state[model.bias].items() if value.numel() > 1][-1]
    optimizer.state[model.bias][key][0] = number
    assert first_broken(model, [optimizer]).what == f"the optimizer's {key} of bias"


def test_a_single_number_of_an_optimizer_may_be_infinite():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.bias]["best_loss"] = torch.tensor(float("inf"))
    assert first_broken(model, [optimizer]) is None


class Break(Callback):
    """Makes one number of this rank's last weight infinite, or of its first moment."""

    def __init__(self, step, moment=False, signum=None, stops=False, validated=False):
        self.step, self.moment, self.signum, self.stops = step, moment, signum, stops
        self.validated = validated  # whether it acts after the validation of that step

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step and not self.validated:
            self.act(trainer, pl_module)

    def on_validation_end(self, trainer, pl_module):
        if trainer.global_step == self.step and self.validated:
            self.act(trainer, pl_module)

    def act(self, trainer, pl_module):
        (optimizer,) = trainer.optimizers
        weight = [*pl_module.parameters()][-1]
        tensor = optimizer.state[weight]["exp_avg"] if self.moment else weight.detach()
        own_part(tensor).view(-1)[-1] = float("inf")
        if self.signum:
            signal.raise_signal(self.signum)
        trainer.should_stop = trainer.should_stop or self.stops


def steps_in(folder):
    return [step_of(path) for path in checkpoints_in(folder)]


EFFECTS = ("signum", "stops", "validated")
KINDS = {
    "due": ({"every": 2}, {}, 4),
    "due after a validation": ({"every": 2}, {"val_every": 2}, 4),
    "best": ({"every": None}, {"val_every": 2, "validated": True}, 4),
    "last": ({"every": 2}, {"max_steps": 3}, 3),
    "stopped by a signal": ({"every": 2}, {"signum": signal.SIGTERM}, 3),
    "stopped by a callback": ({"every": 2}, {"stops": True}, 3),
}


@pytest.fixture
def no_signal():
    """Signals reach no handler of pytest's; what has been received is forgotten."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    stop_signals.received.__init__()


@pytest.mark.usefixtures("no_signal")
@pytest.mark.parametrize("moment", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_save_keeps_a_state_that_is_not_finite(new_run, tmp_path, kind, moment):
    checkpoint, settings, step = KINDS[kind]
    settings = {"max_steps": 9, "val_every": 100, **settings}
    effects = {name: settings.pop(name) for name in EFFECTS if name in settings}
    run = new_run(checkpoint=checkpoint, **settings)
    checkpoints = run.checkpoints(tmp_path)
    what = r"the optimizer's exp_avg of model\.\S+" if moment else r"model\.\S+"
    good = tmp_path / "step=000002.ckpt"
    line = rf"^step {step}: {what} is not finite, .* the newest good checkpoint is {good}; "
    with pytest.raises(RunError, match=line):
        run.fit(Break(step, moment, **effects), GracefulStop(checkpoints), checkpoints)
    assert steps_in(tmp_path) == [2]
    rest = new_run(max_steps=5)
    trainer = rest.fit(rest.checkpoints(tmp_path), ckpt_path=newest_valid(tmp_path))
    assert trainer.global_step == 5


def test_the_first_save_names_no_checkpoint(new_run, tmp_path):
    run = new_run(checkpoint={"every": 2})
    with pytest.raises(RunError, match="isn't kept; there is no checkpoint yet; lower the"):
        run.fit(Break(2), run.checkpoints(tmp_path))
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("moment", [False, True])
def test_all_ranks_refuse_what_one_of_them_has_broken(
    new_run, on_ranks, tmp_path, strategy, moment
):
    """With shards, no other rank could see it."""

    def rank(number):
        run = new_run(max_steps=9, val_every=100, checkpoint={"every": 2})
        os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        chosen = strategies.ddp(**DDP) if strategy == "ddp" else strategies.fsdp2(**FSDP2)
        checkpoints = run.checkpoints(tmp_path)
        breaks = [Break(4, moment)] if number == 1 else []
        try:
            run.fit(*breaks, checkpoints, strategy=chosen, devices=2)
        except RunError as error:
            return str(error)
        return None

    lines = on_ranks(2, rank)
    assert lines[0] == lines[1]
    assert lines[0].startswith("step 4: ")
    assert f"the newest good checkpoint is {tmp_path / 'step=000002.ckpt'}; " in lines[0]
    assert steps_in(tmp_path) == [2]


def test_no_such_state_is_kept_in_memory(new_run, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    directory = RunDirectory(tmp_path / "run")
    directory.create({"seed": 1})
    run = new_run(max_steps=9, val_every=100, checkpoint={"every": 100})
    checkpoints = run.checkpoints(directory.checkpoints)
    state = StateInMemory(Run(directory.path, {"seed": 1}), every=2)
    with pytest.raises(RunError, match=r"^step 6: model"):
        run.fit(Break(6), GracefulStop(), checkpoints, state)
    state.writer.close()
    assert [kept.step for kept in states_in(identity_of(directory))] == [4, 2]
