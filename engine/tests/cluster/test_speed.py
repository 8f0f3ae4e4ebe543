import pytest
import torch

from lockstep.cluster.speed import Speed, measure, stragglers, table


def rank(compute, memory=10e9):
    return Speed(compute, memory, 5e9, 0.4)


@pytest.mark.parametrize(
    ("computes", "status"),
    [([100, 98, 99], "ok"), ([100, 70, 99], "warning"), ([100, 20], "failure")],
)
def test_the_slow_rank_is_named(computes, status):
    compute, memory = stragglers([rank(speed) for speed in computes])
    assert (compute.status, memory.status) == (status, "ok")
    assert status == "ok" or "rank 1" in compute.line


def test_slow_memory_is_worth_a_warning():
    _, memory = stragglers([rank(100), rank(100), rank(100, memory=1e9)])
    assert (memory.status, "rank 2" in memory.line) == ("warning", True)


def test_the_table_compares_every_rank_with_the_median():
    rows = table([rank(100e9), rank(50e9), rank(200e9)], ["a", "a", "b"])
    assert [row["of median"] for row in rows] == [1, 0.5, 2]
    assert [(row["rank"], row["host"]) for row in rows] == [(0, "a"), (1, "a"), (2, "b")]


def test_a_measured_speed_is_between_zero_and_the_peak(composed):
    arrived = []
    for _ in range(5):  # another program may slow down the one product and not the other
        arrived.clear()
        speed = measure(composed(), torch.device("cpu"), 256, lambda: arrived.append(1))
        assert min(speed.compute, speed.memory, speed.host) > 1e6
        assert speed.utilisation > 0
        assert len(arrived) == 3
        if speed.utilisation < 2:  # small products can beat the large one's cache misses
            return
    pytest.fail(f"{speed} is faster than its peak")


@pytest.mark.parametrize(("words", "vocab_size"), [([], None), (["~model.n_layer"], 256)])
def test_a_step_is_timed_only_of_a_model_whose_depth_is_known(composed, words, vocab_size):
    config = composed(*words)
    speed = measure(config, torch.device("cpu"), vocab_size, lambda: None)
    assert speed.compute > 1e6
    assert speed.utilisation is None
