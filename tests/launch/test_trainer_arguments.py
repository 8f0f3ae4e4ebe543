"""Arguments that Lightning's Trainer doesn't have."""

import inspect
from types import SimpleNamespace

import lightning
import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import trainer_arguments as arguments

TRAINER = "lightning.pytorch.Trainer"


def refuse(trainer):
    arguments.refuse_unknown(SimpleNamespace(trainer=trainer))


def test_the_known_arguments_of_the_trainer_are_its_own(monkeypatch):
    checked = []
    monkeypatch.setattr(
        arguments, "check", lambda name, _value, fits, _rule: checked.append((name, fits))
    )
    names = set(inspect.signature(lightning.Trainer).parameters)
    refuse({"_target_": TRAINER, **dict.fromkeys(names)})
    assert names | {"_target_"} >= arguments.OURS
    assert checked == [(f"trainer.{name}", True) for name in sorted(names - arguments.OURS)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("profile", "; did you mean trainer.profiler?"),
        ("zzz", ""),
    ],
)
def test_unknown_trainer_arguments_are_rejected(name, hint):
    with pytest.raises(UserError) as refusal:
        refuse({"_target_": TRAINER, name: 3})
    line = f"trainer.{name}=3 is not an argument of Lightning's Trainer{hint}"
    assert str(refusal.value) == line
    refuse({"_target_": "mine.Trainer", name: 3})  # unknown everywhere


def test_it_is_rejected_before_ranks_start(command):
    stderr = command("train", "experiment=smoke", "+trainer.profile=simple", status=2).stderr
    assert stderr.count("\n") == 1
    assert "did you mean trainer.profiler?" in stderr
