"""Objects that the configuration names, with any Hydra version that is installed."""

from datetime import timedelta

import pytest
from lightning.pytorch.callbacks import Timer

from lockstep_gpt.config import UserError
from lockstep_gpt.training.building import build

TIMER = "lightning.pytorch.callbacks.Timer"
DURATION = {"_target_": "datetime.timedelta", "seconds": 3}


def test_a_node_is_built_with_the_nodes_in_it_and_what_it_takes_of_the_known():
    timer = build(
        {"_target_": TIMER, "duration": DURATION},
        {"interval": "epoch", "nothing": 1},
    )
    assert isinstance(timer, Timer)
    assert (timer._duration, timer._interval) == (timedelta(seconds=3).total_seconds(), "epoch")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "os.system", "command": "true"},
        {"_target_": TIMER, "duration": {"_target_": "subprocess.run", "args": ["true"]}},
    ],
)
def test_what_runs_anything_that_it_is_given_is_refused(node):
    with pytest.raises(UserError, match=r"os\.system|subprocess\.run"):
        build(node, {})
