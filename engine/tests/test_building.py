"""What `lockstep.build` gives to a class, and what it refuses."""

from collections.abc import Callable

import pytest
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

import lockstep
from lockstep.errors import UserError


class Owner:
    """What an owner may name: it calls `make` later."""

    def __init__(self, make: Callable[..., object], others: object = None) -> None:
        self.made = make(in_features=2)


def test_a_class_gets_what_it_or_a_base_class_names_and_nothing_else():
    trainer = lockstep.build({"_target_": "lightning.Trainer"}, max_steps=3, batch=8)
    assert isinstance(trainer, Trainer)
    assert trainer.max_steps == 3
    strategy = lockstep.build(
        {"_target_": "lightning.pytorch.strategies.DDPStrategy", "static_graph": True}, batch=8
    )
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs == {"static_graph": True}


@pytest.mark.parametrize("node", [None, 3, "ddp"])
def test_what_is_no_node_is_refused(node):
    with pytest.raises(UserError, match="is no node that names its class by _target_"):
        lockstep.build(node)


def test_a_class_without_arguments_refuses_any():
    with pytest.raises(UserError, match=r"has no argument depth"):
        lockstep.build({"_target_": "lockstep.tokens.prepared.Stream", "depth": 3})


LINEAR = {"_target_": "torch.nn.Linear", "out_features": 3}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"make": LINEAR}, "make: Linear needs in_features; if code gives that later, its YAML"),
        ({"make": {"out_features": 3}}, "make must be a function; its YAML file needs _target_,"),
        ({"make": 3}, "make must be a function; its YAML file needs _target_,"),
        ({"make": {**LINEAR, "_partial_": True}, "others": {"a": LINEAR}}, "others.a: Linear ne"),
    ],
)
def test_a_function_that_code_calls_later_needs_a_target_and_partial(arguments, line):
    with pytest.raises(UserError) as mistake:
        lockstep.build({"_target_": f"{__name__}.Owner", **arguments})
    assert str(mistake.value).startswith(line)
    assert "\n" not in str(mistake.value)


def test_what_comes_later_may_lack_in_a_node_of_a_function():
    made = lockstep.build({"_target_": f"{__name__}.Owner", "make": {**LINEAR, "_partial_": True}})
    assert made.made.in_features == 2


@pytest.mark.parametrize(
    ("own", "given", "remedy"),
    [
        ({"max_steps": 7}, {"max_steps": 20}, "max_steps=20; set max_steps instead"),
        (
            {"accumulate_grad_batches": 7},
            {"accumulate_grad_batches": 1},
            "accumulate_grad_batches=1; set batch.micro_size instead",
        ),
        ({"log_every_n_steps": 7}, {"log_every_n_steps": 1}, "log_every_n_steps=1; leave it out"),
    ],
)
def test_the_setting_that_decides_an_argument_is_named_if_there_is_one(own, given, remedy):
    node = {"_target_": "lightning.Trainer", **own}
    whole = OmegaConf.create({"max_steps": 20, "batch": {"micro_size": None}, "trainer": node})
    (name,) = own
    with pytest.raises(UserError) as refusal:
        lockstep.build(whole.trainer, **given)
    assert str(refusal.value) == f"trainer.{name}=7: the program gives {remedy}"
    with pytest.raises(UserError, match=f"^{name}=7: .*; leave it out$"):
        lockstep.build(node, **given)
