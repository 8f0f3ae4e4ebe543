import doctest
import hashlib
import math
import struct
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from lockstep import schedule as tested
from lockstep.batch import Batch
from lockstep.building import build
from lockstep.errors import UserError
from lockstep.schedule import DECAYS, SCALINGS, Schedule, scaled_lr

# Of presets: steps, warmup, and decay; the peak; and a hash of the rates of all steps and 10 more,
# as version 0.2 had them, by devices, whether `batch.global_size` is fixed, and rule.
REFERENCE = {
    ("debug", 1, "fixed", "linear"): (5, 0, 4, 0.0003333333333333333, "c573eda4ced4"),
    ("debug", 4, "weak", "linear"): (5, 0, 4, 0.0013333333333333333, "911087e68554"),
    ("debug", 4, "weak", "sqrt"): (5, 0, 4, 0.0011547005383792516, "893a5e0fb81a"),
    ("gpt2_124m", 1, "fixed", "linear"): (4768, 256, 4512, 0.0006, "98a568bb0d8d"),
    ("gpt2_124m", 4, "weak", "linear"): (4768, 256, 4512, 1.875e-05, "7c9dcd16177c"),
    ("gpt2_124m", 4, "weak", "sqrt"): (4768, 256, 4512, 0.00010606601717798212, "f26a8ce8ac39"),
    ("gpt2_classic", 1, "fixed", "linear"): (2000, 101, 1899, 0.001, "47257a3b5909"),
    ("gpt2_classic", 4, "weak", "linear"): (
        2000,
        101,
        1899,
        0.0013333333333333333,
        "3a6fe7e661f7",
    ),
    ("gpt2_classic", 4, "weak", "sqrt"): (
        2000,
        101,
        1899,
        0.0011547005383792516,
        "63e1d86a321c",
    ),
    ("modern_124m", 1, "fixed", "linear"): (4768, 100, 2861, 0.03, "2d38798b96f5"),
    ("modern_124m", 4, "weak", "linear"): (4768, 100, 2861, 0.0009375, "a0af4a4ea6e7"),
    ("modern_124m", 4, "weak", "sqrt"): (4768, 100, 2861, 0.005303300858899107, "a1debdc08ba8"),
    ("quickstart", 1, "fixed", "linear"): (300, 15, 180, 0.03, "ba9dd700188d"),
    ("quickstart", 4, "weak", "linear"): (300, 15, 180, 0.039999999999999994, "671dbed74c0b"),
    ("quickstart", 4, "weak", "sqrt"): (300, 15, 180, 0.03464101615137754, "8f68590b1ef4"),
    ("smoke", 1, "fixed", "linear"): (20, 5, 15, 0.003, "7d94a27111e4"),
    ("smoke", 4, "weak", "linear"): (20, 5, 15, 0.006, "36124e926a99"),
    ("smoke", 4, "weak", "sqrt"): (20, 5, 15, 0.004242640687119286, "21c1ec8198d6"),
}
WEAK = ("batch.global_size=null", "batch.micro_size=4")


def schedule_of(config: DictConfig, devices: int) -> Schedule:
    """Return the rate of a run as `train.build` makes it."""
    batch = build(config.batch).spread_over(devices)
    peak = scaled_lr(config.optim.lr, batch, config.lr_scaling)
    plan: Schedule = build(config.schedule, steps=config.max_steps, peak=peak)
    return plan


def schedule(**arguments: Any) -> Schedule:
    return Schedule(**{"steps": 100, "peak": 1e-3, **arguments})


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    total = draw(st.integers(1, 400))
    return Schedule(
        steps=total,
        peak=draw(st.floats(1e-6, 1)),
        warmup=draw(st.integers(0, total - 1)),
        decay=draw(st.sampled_from(DECAYS)),
        decay_fraction=draw(st.floats(0.001, 1)),
        final_fraction=draw(st.floats(0, 1)),
    )


@pytest.mark.parametrize("case", REFERENCE)
def test_the_rate_of_each_step_has_the_bits_that_it_had(
    composed: Any, case: tuple[str, int, str, str]
) -> None:
    preset, devices, kind, rule = case
    words = [*WEAK, f"lr_scaling={rule}"] if kind == "weak" else []
    config = composed(f"experiment={preset}", "trainer=cpu", *words)
    plan = schedule_of(config, devices)
    rates = [plan.lr(step) for step in range(plan.steps + 10)]
    bits = hashlib.sha256(struct.pack(f"<{len(rates)}d", *rates)).hexdigest()[:12]
    found = (plan.steps, plan.warmup_steps, plan.decay_steps, plan.peak, bits)
    assert found == REFERENCE[case]


def test_a_free_global_batch_scales_the_rate_with_the_devices() -> None:
    batch = Batch(micro_size=32, reference_size=32).spread_over(devices=4)
    assert scaled_lr(1e-3, batch) == 4e-3


@pytest.mark.parametrize(("rule", "scale"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_each_scaling_rule_follows_the_global_batch(rule: str, scale: float) -> None:
    assert scaled_lr(1.0, Batch(48, reference_size=12), rule) == scale
    assert rule in SCALINGS


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"steps": 0}, "max_steps=0 must be at least 1"),
        ({"steps": 9.5}, "max_steps=9.5 must be a whole number"),
        ({"peak": 0}, "peak=0 must be above 0"),
        ({"peak": math.inf}, "peak=inf must be a finite number"),
        ({"peak": "fast"}, "peak=fast must be a number"),
        ({"warmup": -1}, "warmup=-1 must be at least 0"),
        ({"start_factor": 0}, "start_factor=0 must be above 0"),
        ({"start_factor": 1.5}, "start_factor=1.5 must be at most 1"),
        ({"decay": "no_such"}, "decay=no_such is not one of cosine, linear, constant, wsd"),
        ({"decay_fraction": 0}, "decay_fraction=0 must be above 0"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5 must be at most 1"),
        ({"final_fraction": -0.5}, "final_fraction=-0.5 must be at least 0"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        schedule(**arguments)
    assert str(refusal.value) == line


def test_a_wrong_rule_or_rate_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^lr_scaling=cubic is not one of linear, sqrt, none$"):
        scaled_lr(1e-3, Batch(8), "cubic")
    with pytest.raises(UserError, match=r"^optim\.lr=-1 must be above 0$"):
        scaled_lr(-1, Batch(8))


@pytest.mark.parametrize(("warmup", "start"), [(5, 0.1), (2, 0.5), (30, 1.0), (4, 0.25)])
def test_a_warmup_from_a_start_factor_is_that_of_torch(warmup: int, start: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, start, total_iters=warmup - 1)
    ours = schedule(steps=60, peak=0.4, warmup=warmup, start_factor=start)
    for step in range(warmup):
        assert ours.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_without_a_warmup_the_first_step_is_at_the_peak() -> None:
    assert schedule().warmup_steps == 0
    assert schedule(peak=0.5).lr(0) == 0.5


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (256, 25), (257, 256)])
def test_a_warmup_as_long_as_the_run_becomes_a_tenth_of_it(steps: int, warmup: int) -> None:
    assert schedule(steps=steps, warmup=256).warmup_steps == warmup


@pytest.mark.parametrize("preset", ["debug", "gpt2_124m", "modern_124m", "quickstart", "smoke"])
def test_each_preset_can_be_tried_for_three_steps(composed: Any, preset: str) -> None:
    short = composed(f"experiment={preset}", "trainer=cpu", "max_steps=3")
    plan = schedule_of(short, 1)
    assert (plan.steps, plan.warmup_steps) == (3, 0)
    assert plan.lr(0) == plan.peak


@given(schedules())
def test_warmup_rises_linearly_from_above_zero_to_the_peak(plan: Schedule) -> None:
    for step in range(plan.warmup_steps):
        assert plan.lr(step) == pytest.approx(plan.peak * (step + 1) / plan.warmup_steps)
    if plan.warmup_steps:
        assert plan.factor(plan.warmup_steps - 1) == 1


@given(schedules())
def test_rate_stays_between_its_bounds_and_never_rises_after_the_warmup(plan: Schedule) -> None:
    rates = [plan.lr(step) for step in range(plan.steps + 5)]
    assert max(rates) <= plan.peak
    course = rates[plan.warmup_steps :]
    assert all(later <= earlier for earlier, later in pairwise(course))
    assert min(course) >= plan.peak * plan.final_fraction


@given(schedules())
def test_the_last_step_has_the_final_rate_and_keeps_it(plan: Schedule) -> None:
    fraction = 1.0 if plan.decay == "constant" else plan.final_fraction
    for step in (plan.steps - 1, plan.steps, 10 * plan.steps):
        assert plan.lr(step) == plan.peak * fraction


@given(schedules())
def test_the_rate_never_jumps_more_than_its_decay(plan: Schedule) -> None:
    steepest = math.pi / 2 / max(1, plan.decay_steps)
    for step in range(max(0, plan.warmup_steps - 1), plan.steps - 1):
        assert plan.factor(step) - plan.factor(step + 1) <= steepest + 1e-12


def test_cosine_is_half_way_down_in_the_middle() -> None:
    plan = schedule(steps=101, final_fraction=0.1)
    assert plan.factor(50) == pytest.approx(0.55)
    assert plan.factor(25) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_wsd_stays_at_the_peak_and_falls_in_the_last_share_of_the_run() -> None:
    plan = schedule(warmup=10, decay="wsd", decay_fraction=0.2, final_fraction=0.0)
    assert [plan.factor(step) for step in (9, 50, 79)] == [1, 1, 1]
    assert [plan.factor(step) for step in (80, 89, 99)] == pytest.approx([0.95, 0.5, 0])


def test_constant_never_falls() -> None:
    plan = schedule(decay="constant", final_fraction=0.0)
    assert {plan.factor(step) for step in range(200)} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ({}, ", cosine decay over the last 900 to 0.0004"),
        ({"decay": "wsd"}, ", wsd decay over the last 200 to 0.0004"),
        ({"decay": "constant"}, ", then constant"),
    ],
)
def test_the_receipt_shows_the_schedule_in_steps(arguments: dict[str, Any], end: str) -> None:
    plan = schedule(steps=1000, peak=4e-3, warmup=100, **arguments)
    assert plan.receipt_lines() == {"schedule": f"1,000 steps: 100 of warmup to 0.004{end}"}


def test_the_examples_run() -> None:
    result = doctest.testmod(tested)
    assert result.attempted > 3
    assert result.failed == 0
