"""Objects that the configuration names, with any Hydra version that is installed."""

from datetime import timedelta

import pytest
from lightning.pytorch.callbacks import Timer

from lockstep_gpt.errors import UserError
from lockstep_gpt.training.building import build, build_callback

TIMER = "lightning.pytorch.callbacks.Timer"
DURATION = {"_target_": "datetime.timedelta", "seconds": 3}


def test_a_node_is_built_with_its_children_and_known_arguments():
    timer = build(
        {"_target_": TIMER, "duration": DURATION},
        {"interval": "epoch", "nothing": 1},
    )
    assert isinstance(timer, Timer)
    assert (timer._duration, timer._interval) == (timedelta(seconds=3).total_seconds(), "epoch")


def test_an_argument_with_a_typing_error_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"Timer has no argument intervall; use interval$"):
        build({"_target_": TIMER, "duration": DURATION, "intervall": "step"}, {})


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "os.system", "command": "true"},
        {"_target_": TIMER, "duration": {"_target_": "subprocess.run", "args": ["true"]}},
    ],
)
def test_functions_that_run_any_code_are_rejected(node):
    with pytest.raises(UserError, match=r"os\.system|subprocess\.run"):
        build(node, {})


def test_a_class_that_is_no_callback_is_refused_by_its_name():
    with pytest.raises(UserError, match=r"^callbacks\.mine: collections\.Counter is not a "):
        build_callback("mine", {"_target_": "collections.Counter"}, {})
    node = {"_target_": TIMER, "duration": DURATION}
    assert isinstance(build_callback("mine", node, {}), Timer)
