"""The promise, for this project's own model, data, and optimizer."""

import pytest

from lockstep.testing import assert_lockstep

pytestmark = pytest.mark.slow

MAIN = "lockstep_gpt"


@pytest.fixture
def small(command, monkeypatch, request):
    """The smoke experiment of a few steps, in a folder of the test."""
    request.getfixturevalue("quick_ranks")
    monkeypatch.chdir(command.folder)
    return ["experiment=smoke", "max_steps=4", "callbacks=[]", f"data.root={command.data_root}"]


def test_devices_change_the_speed_and_not_the_losses(small):
    assert_lockstep(MAIN, small, ranks=(1, 2, 4), tolerance=1e-12, precision="64-true")


def test_exact_sums_are_equal_to_the_last_bit(small):
    assert_lockstep(MAIN, [*small, "batch.exact_micro_size=2"], ranks=(1, 2, 4))


def test_a_killed_run_continues_with_the_same_bits(small):
    assert_lockstep(MAIN, small, ranks=(2,), kill_after=2)
