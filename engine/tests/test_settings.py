"""A setting outside its limits is one line with the value and the rule, whoever checks it."""

import math

import pytest
from lockstep_gpt.train import build
from omegaconf import OmegaConf

import lockstep
from lockstep.errors import UserError
from lockstep.launch import composed as composing
from lockstep.launch import hydra_job, targets
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.launch.main import training

WRONG = {
    "seed=-1": "must be at least 0",
    "seed=18446744073709551616": "must be at most",
    "val_every=0": "must be at least 1",
    "log_every=-5": "must be at least 1",
    "max_skipped=-1": "must be at least 0",
    "val_tokens=0": "must be at least 1",
    "clip_norm=0.0": "must be above 0",
    "lr_scaling=no_such": "is not one of linear, sqrt, none",
    "batch.micro_size=0": "must be at least 1",
    "batch.global_size=-4": "must be at least 1",
    "batch.reference_size=0": "must be at least 1",
    "model.block_size=0": "must be at least 1",
    "model.n_layer=0": "must be at least 1",
    "model.n_layer=99999999": "must be at most 10000",
    "model.n_head=0": "must be at least 1",
    "model.n_embd=-8": "must be at least 1",
    "model.n_embd=33": "is not divisible by model.n_head=2; nearest: model.n_embd=32",
    "model.dropout=-0.1": "must be at least 0",
    "model.dropout=1.0": "must be below 1",
    "data.source.val_fraction=0.0": "must be above 0",
    "data.source.val_fraction=1.0": "must be below 1",
    "tokenizer=null": "must be a text",
    "data.source.val_fraction=much": "must be a number",
    "data.source.shard_mb=1.5": "must be a whole number",
    "optim.lr=0.0": "must be above 0",
    "optim.beta1=1.0": "must be below 1",
    "optim.beta2=-0.5": "must be at least 0",
    "optim.eps=0.0": "must be above 0",
    "optim.weight_decay=-0.5": "must be at least 0",
    "schedule.warmup=-1": "must be at least 0",
    "schedule.decay=no_such": "is not one of cosine, linear, constant, wsd",
    "schedule.decay_fraction=0.0": "must be above 0",
    "schedule.decay_fraction=1.5": "must be at most 1",
    "schedule.final_fraction=-0.5": "must be at least 0",
    "checkpoint.every=0": "must be at least 1",
    "checkpoint.keep_last=0": "must be at least 1",
    "checkpoint.keep_best=-1": "must be at least 0",
    "checkpoint.mode=no_such": "is not one of min, max",
    "guard.stall_after=0": "must be above 0",
    "guard.replicas_every=0": "must be at least 1",
    "memory=sometimes": "must be auto, false, or a number of steps",
    "tokenizer=no_such": "",
    "precision=no_such": "",
    "max_steps=0": "must be at least 1",
}
SAME = {"max_steps": "steps", "clip_norm": "max_norm"}  # where a class has another word for it


@pytest.fixture
def refusal(composed, command, tmp_path):
    """Return the line with which a run with these words is refused, before its first step."""

    def refused(*words):
        words = ("experiment=smoke", f"data.root={command.data_root}", "logger=none", *words)
        cfg = composed(*words)

        def begin():
            values = hydra_job.values_to_freeze(cfg)
            targets.refuse_mistakes(values, {"*": ("*",)})
            values["trainer"] |= {"accelerator": "cpu", "devices": 1}
            composing.refuse_other_kinds(training().source, words, values)
            module, _, _ = build(OmegaConf.create(values), lockstep.Run.alone(tmp_path / "run"))
            module.configure_optimizers()

        with pytest.raises(UserError) as error:
            begin()
        return str(error.value)

    return refused


@pytest.mark.parametrize(("setting", "rule"), WRONG.items())
def test_a_value_outside_its_limits_is_one_line(refusal, setting, rule):
    line = refusal(setting)
    name, _, value = setting.partition("=")
    assert "\n" not in line
    assert rule in line
    assert value.rstrip("0").rstrip(".") in line
    last = name.rpartition(".")[2]
    assert last in line or SAME.get(last, last) in line


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["optim.lr", "optim.eps", "clip_norm", "model.dropout", "schedule.final_fraction"]
)
def test_nan_and_infinity_are_refused(refusal, name, value):
    assert "must be" in refusal(f"{name}={value}")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"max_restarts": -1}, "launch.max_restarts=-1 must be at least 0"),
        ({"grace_seconds": 0.0}, "launch.grace_seconds=0.0 must be above 0"),
        ({"zzz": 1}, "launch.zzz is not one of "),
    ],
)
def test_settings_of_the_launch_are_checked_before_ranks_start(values, line):
    with pytest.raises(UserError) as error:
        LaunchSettings.of({"launch": values})
    assert str(error.value).startswith(line)
