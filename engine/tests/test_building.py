"""What `lockstep.build` gives to a class, and what it refuses."""

import pytest
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy

import lockstep
from lockstep.errors import UserError


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
        lockstep.build({"_target_": "lockstep.tokens.packing.Stream", "depth": 3})
