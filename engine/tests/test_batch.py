import copy
import dataclasses
import doctest
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel

from lockstep import batch as tested
from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.ranks.ranks import Ranks

SIZES = st.integers(1, 64)


@given(micro=SIZES, devices=SIZES, nodes=SIZES, accumulation=SIZES)
def test_a_global_size_that_divides_is_reached_exactly(
    micro: int, devices: int, nodes: int, accumulation: int
) -> None:
    size = micro * devices * nodes * accumulation
    spread = Batch(size, micro).spread_over(devices, nodes)
    assert (spread.micro_size, spread.accumulation, spread.global_size) == (
        micro,
        accumulation,
        size,
    )
    assert (spread.devices, spread.nodes, spread.world_size) == (devices, nodes, devices * nodes)


@given(size=SIZES, devices=SIZES)
def test_without_a_micro_size_each_device_has_its_part(size: int, devices: int) -> None:
    spread = Batch(size * devices).spread_over(devices)
    assert (spread.micro_size, spread.accumulation) == (size, 1)


@given(micro=SIZES, devices=SIZES, nodes=SIZES, size=st.integers(1, 10_000))
def test_sizes_named_in_an_error_are_the_nearest_valid_ones(
    micro: int, devices: int, nodes: int, size: int
) -> None:
    step = micro * devices * nodes
    if size % step == 0:
        return
    with pytest.raises(UserError) as refusal:
        Batch(size, micro).spread_over(devices, nodes)
    remedies = str(refusal.value).split("nearest: ")[1]
    named = [int(number) for number in re.findall(r"\d+", remedies.split(", or keep")[0])]
    assert named == [near for near in (size // step * step, size // step * step + step) if near]
    for near in named:
        assert Batch(near, micro).spread_over(devices, nodes).global_size == near
    smaller = [m for m in range(1, micro + 1) if size % (m * devices * nodes) == 0]
    offered = re.findall(r"batch\.micro_size=(\d+)", remedies)
    assert offered == ([str(max(smaller))] if smaller else [])


def test_an_error_is_one_line_with_value_rule_and_remedies() -> None:
    with pytest.raises(UserError) as refusal:
        Batch(global_size=100, micro_size=12).spread_over(devices=2, nodes=2)
    assert str(refusal.value) == (
        "batch.global_size=100 is not divisible by batch.micro_size=12 x 2 devices x 2 nodes = 48; "
        "nearest: batch.global_size=96 or 144, or keep it with batch.micro_size=5"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "batch.micro_size=null and batch.global_size=null leave it open; set one of them"),
        ({"global_size": 0}, "batch.global_size=0 must be at least 1"),
        ({"global_size": "8"}, "batch.global_size=8 must be a whole number"),
        ({"global_size": True}, "batch.global_size=true must be a whole number"),
        ({"micro_size": 1.5}, "batch.micro_size=1.5 must be a whole number"),
        (
            {"micro_size": 10**16},
            f"batch.micro_size={10**16} must be at most {10**15}",
        ),
        ({"micro_size": 1, "reference_size": 0}, "batch.reference_size=0 must be at least 1"),
        ({"micro_size": 1, "exact_threads": 9999}, "batch.exact_threads=9999 must be at most 4096"),
    ],
)
def test_a_wrong_argument_is_one_line_before_devices_are_known(
    arguments: dict[str, int], line: str
) -> None:
    with pytest.raises(UserError) as refusal:
        Batch(**arguments)
    assert str(refusal.value) == line


@pytest.mark.parametrize("name", ["accumulation", "world_size", "data_parallel", "devices"])
def test_what_depends_on_devices_is_refused_before_they_are_known(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"depends on the devices; call batch\.spread_over"):
        getattr(Batch(8), name)


def test_what_does_not_depend_on_devices_is_known_at_once() -> None:
    assert Batch(48).global_size == 48
    assert Batch(48, 4).micro_size == 4
    assert Batch(48, exact_micro_size=2).micro_size == 2
    with pytest.raises(RuntimeError, match=r"Batch\.micro_size depends"):
        Batch(48).micro_size  # noqa: B018
    with pytest.raises(RuntimeError, match=r"Batch\.micro_size depends|Batch\.devices depends"):
        Batch(micro_size=4).global_size  # noqa: B018


def test_a_batch_can_be_spread_again() -> None:
    for batch in (Batch(48), Batch(48, 4), Batch(micro_size=4), Batch(32, exact_micro_size=2)):
        assert batch.spread_over(4).spread_over(2) == batch.spread_over(2)


def test_a_batch_is_frozen_and_equal_to_its_copies() -> None:
    batch = Batch(48, 4, reference_size=24).spread_over(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.reference_size = 1  # type: ignore[misc]
    assert batch == copy.deepcopy(batch) == pickle.loads(pickle.dumps(batch))
    assert {batch: 1}[copy.copy(batch)] == 1
    assert batch != Batch(48, 4, reference_size=24)
    assert repr(batch) == (
        "Batch(global_size=48, micro_size=4, reference_size=24) over 2 devices x 1 node"
    )


def test_a_fixed_global_batch_of_128_on_4_devices_is_32_each() -> None:
    batch = Batch(128, 32).spread_over(devices=4)
    assert (batch.accumulation, batch.global_size // batch.world_size) == (1, 32)
    assert not batch.grows


def test_a_free_global_batch_grows_with_the_devices() -> None:
    batch = Batch(micro_size=32).spread_over(devices=4)
    assert (batch.global_size, batch.grows, batch.is_exact) == (128, True, False)


class Steps(BoringModel):
    """Notes after which optimizer steps it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def on_validation_start(self) -> None:
        self.validated.append(self.trainer.global_step)


def test_the_arithmetic_needs_no_torch() -> None:
    modules = "lockstep.batch, lockstep.schedule"
    code = f"import sys, {modules}; exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("world_size", "nodes"), [(1, 1), (4, 1), (4, 2), (6, 3)])
def test_ranks_say_how_many_devices_and_nodes_there_are(world_size: int, nodes: int) -> None:
    ranks = Ranks(0, 0, world_size, world_size // nodes)
    assert Batch(48).spread_over(ranks) == Batch(48).spread_over(world_size // nodes, nodes)
    assert Batch(48).spread_over(ranks).is_spread
    assert not Batch(48).is_spread


def test_ranks_may_share_samples() -> None:
    batch = Batch(48).spread_over(Ranks(0, 0, 4, 4), tensor_parallel=2)
    assert (batch.world_size, batch.data_parallel, batch.micro_size) == (4, 2, 24)


def said(devices: int = 2, nodes: int = 1, **arguments: int | None) -> dict[str, str]:
    return Batch(**{"global_size": 48, **arguments}).spread_over(devices, nodes).receipt_lines()


def test_the_receipt_writes_the_arithmetic_out() -> None:
    samples = "48 samples per step, 4 x batch.reference_size=12"
    line = said(micro_size=4)["batch"]
    assert line == f"2 devices x 1 node x 4 samples x 6 accumulation = {samples}"
    line = said(devices=1, nodes=2, micro_size=4, reference_size=48)["batch"]
    assert line == "1 device x 2 nodes x 4 samples x 6 accumulation = 48 samples per step"
    assert " x 1 sample x " in said(devices=48)["batch"]


def test_the_receipt_names_devices_with_equal_bits() -> None:
    line = said(exact_micro_size=4, devices=3)["sums"]
    assert line == (
        "equal bits on 1, 3, 6, or 12 devices of one kind: 12 micro-batches in one order, "
        "1 thread each; plus memory for 2 more gradients of all weights"
    )
    assert "for 1 more gradient of" in said(exact_micro_size=4, devices=6)["sums"]


def test_the_receipt_names_a_size_for_equal_bits() -> None:
    assert said(micro_size=4)["sums"] == (
        "added in rank order: equal up to rounding on any number of devices; set "
        "batch.exact_micro_size=4 for equal bits on 1, 3, 6, or 12, with 12 micro-batches per step"
    )
    whole = said(micro_size=48, devices=1)["sums"]
    assert "set batch.exact_micro_size=12 for equal bits on 1, 2, or 4, with" in whole
    grown = said(global_size=None, micro_size=4)["sums"]
    assert grown == "added in rank order; on another number of devices, the batch is another one"
    assert said(global_size=13, micro_size=13, devices=1)["sums"].endswith("number of devices")


def test_random_numbers_are_equal_only_with_micro_batches_of_one_size() -> None:
    """They belong to micro-batches, so the receipt excepts them if their size follows devices."""
    open_size = Batch(48)
    of_step = [open_size.spread_over(devices).micro_size for devices in (1, 2)]
    assert of_step == [48, 24]
    exception = "any number of devices, but for random numbers, such as dropout; set batch.exact_mi"
    assert exception in said()["sums"]
    for fixed in ({"micro_size": 4}, {"exact_micro_size": 4}):
        assert Batch(48, **fixed).fixes_micro_batches
        assert "random numbers" not in said(**fixed, devices=1)["sums"]
    assert not open_size.fixes_micro_batches
    assert not Batch(micro_size=4).fixes_micro_batches


def test_the_examples_run() -> None:
    result = doctest.testmod(tested)
    assert result.attempted > 3
    assert result.failed == 0
