"""The ranks that a launcher has started, and settings that conflict with them."""

import pytest

from lockstep.errors import UserError
from lockstep.launch import devices
from lockstep.launch.devices import Placement, found
from lockstep.launch.launch_settings import LaunchSettings


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Start this process as one of `ranks` on each of `nodes` machines without a GPU."""
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi

    def by_a_launcher(ranks, nodes=1):
        sizes = {"RANK": 0, "WORLD_SIZE": ranks * nodes, "LOCAL_WORLD_SIZE": ranks}
        sizes |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        for name, value in sizes.items():
            monkeypatch.setenv(name, str(value))

    return by_a_launcher


@pytest.mark.parametrize("trainer", [{}, {"devices": 4}, {"devices": "auto", "num_nodes": 2}])
def test_inside_a_launcher_its_ranks_are_taken(launched, trainer):
    launched(ranks=4, nodes=2)
    assert found({"trainer": trainer}, LaunchSettings()) == Placement("cpu", 4, 2)


def test_ranks_that_a_launcher_did_not_start_are_rejected(launched):
    launched(ranks=4, nodes=2)
    for trainer, line in (
        ({"devices": 8}, "devices=8 but the launcher started 4 ranks"),
        ({"num_nodes": 3}, "num_nodes=3 but the launcher started 2; set trainer.num_nodes=2"),
    ):
        with pytest.raises(UserError, match=rf"^trainer\.{line}"):
            found({"trainer": trainer}, LaunchSettings())
