import math
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.schedule import (
    BatchPlan,
    Schedule,
    plan_batch,
    plan_schedule,
)

SIZES = st.integers(1, 64)
DECAYS = ["cosine", "linear", "constant", "wsd"]


def config(batch: BatchConfig | None = None, max_tokens: int | None = None, **optim: Any) -> Config:
    return Config(
        max_steps=None if max_tokens else optim.pop("max_steps", 100),
        max_tokens=max_tokens,
        batch=batch or BatchConfig(micro_size=12),
        optim=OptimConfig(algorithm="adamw", **optim),
    )


def schedule(**optim: Any) -> Schedule:
    return plan_schedule(config(**optim), BatchPlan(12, 1, 1, 1, 64))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    total = draw(st.integers(1, 400))
    return schedule(
        max_steps=total,
        warmup_steps=draw(st.integers(0, total - 1)),
        decay=draw(st.sampled_from(DECAYS)),
        decay_fraction=draw(st.floats(0.001, 1)),
        final_lr_fraction=draw(st.floats(0, 1)),
        lr=draw(st.floats(1e-6, 1)),
    )


@given(micro=SIZES, devices=SIZES, nodes=SIZES, accumulation=SIZES)
def test_a_global_size_that_divides_is_reached_exactly(
    micro: int, devices: int, nodes: int, accumulation: int
) -> None:
    size = micro * devices * nodes * accumulation
    plan = plan_batch(BatchConfig(micro, size), 128, devices, nodes)
    assert plan == BatchPlan(micro, devices, nodes, accumulation, 128)
    assert plan.global_size == size
    assert plan.tokens_per_step == size * 128


@given(micro=SIZES, devices=SIZES, nodes=SIZES, size=st.integers(1, 10_000))
def test_sizes_named_in_an_error_are_the_nearest_valid_ones(
    micro: int, devices: int, nodes: int, size: int
) -> None:
    step = micro * devices * nodes
    if size % step == 0:
        return
    with pytest.raises(UserError) as refusal:
        plan_batch(BatchConfig(micro, size), 128, devices, nodes)
    remedies = str(refusal.value).split("nearest: ")[1]
    named = [int(number) for number in re.findall(r"\d+", remedies.split(", or keep")[0])]
    assert named == [near for near in (size // step * step, size // step * step + step) if near]
    for near in named:
        assert plan_batch(BatchConfig(micro, near), 128, devices, nodes).global_size == near
    smaller = [m for m in range(1, micro + 1) if size % (m * devices * nodes) == 0]
    offered = re.findall(r"batch\.micro_size=(\d+)", remedies)
    assert offered == ([str(max(smaller))] if smaller else [])


def test_an_error_is_one_line_with_value_rule_and_remedies() -> None:
    with pytest.raises(UserError) as refusal:
        plan_batch(BatchConfig(micro_size=12, global_size=100), 128, devices=2, nodes=2)
    assert str(refusal.value) == (
        "batch.global_size=100 is not divisible by batch.micro_size=12 x 2 devices x 2 nodes = 48; "
        "nearest: batch.global_size=96 or 144, or keep it with batch.micro_size=5"
    )


def test_a_fixed_global_batch_of_128_on_4_devices_is_32_each() -> None:
    plan = plan_batch(BatchConfig(micro_size=32, global_size=128), 64, devices=4, nodes=1)
    assert (plan.accumulation, plan.global_size // plan.world_size) == (1, 32)


def test_a_free_global_batch_grows_with_the_devices_and_the_rate_with_it() -> None:
    batch = BatchConfig(micro_size=32, reference_size=32)
    plan = plan_batch(batch, 64, devices=4, nodes=1)
    assert plan.global_size == 128
    assert plan_schedule(config(batch, lr=1e-3), plan).peak_lr == 4e-3


@pytest.mark.parametrize(("rule", "scale"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_each_scaling_rule_follows_the_global_batch(rule: str, scale: float) -> None:
    batch = BatchConfig(micro_size=12, reference_size=12)
    plan = plan_batch(batch, 64, devices=2, nodes=2)
    assert plan_schedule(config(batch, lr_scaling=rule), plan).scale == scale


@given(micro=SIZES, world=SIZES, max_tokens=st.integers(1, 10**9))
def test_a_budget_in_tokens_is_covered_by_the_fewest_whole_steps(
    micro: int, world: int, max_tokens: int
) -> None:
    plan = BatchPlan(micro, world, 1, 1, 128)
    steps = plan_schedule(config(max_tokens=max_tokens), plan).total_steps
    assert (steps - 1) * plan.tokens_per_step < max_tokens <= steps * plan.tokens_per_step


def test_a_warmup_in_tokens_keeps_its_length_at_any_world_size() -> None:
    one, four = (
        plan_schedule(config(max_tokens=10**6, warmup_tokens=10**5), BatchPlan(10, n, 1, 1, 100))
        for n in (1, 4)
    )
    assert (one.warmup_steps, four.warmup_steps) == (100, 25)


def test_without_a_warmup_the_first_step_is_at_the_peak() -> None:
    assert schedule().warmup_steps == 0
    assert schedule(lr=0.5).lr(0) == 0.5


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (256, 25), (257, 256)])
@pytest.mark.parametrize("unit", [{"warmup_steps": 256}, {"warmup_tokens": 256 * 12 * 64}])
def test_a_warmup_as_long_as_the_run_becomes_a_tenth_of_it(
    unit: dict[str, int], steps: int, warmup: int
) -> None:
    plan = schedule(max_steps=steps, **unit)
    assert (plan.total_steps, plan.warmup_steps) == (steps, warmup)


@pytest.mark.parametrize("preset", ["debug", "gpt2_124m", "modern_124m", "quickstart", "smoke"])
def test_each_preset_can_be_tried_for_three_steps(composed: Any, preset: str) -> None:
    short = composed(f"experiment={preset}", "trainer=cpu", "max_steps=3")
    plan = plan_schedule(short, plan_batch(short.batch, short.model.block_size, 1, 1))
    assert (plan.total_steps, plan.warmup_steps) == (3, 0)
    assert plan.lr(0) == plan.peak_lr


@given(schedules())
def test_warmup_rises_linearly_from_above_zero_to_the_peak(plan: Schedule) -> None:
    for step in range(plan.warmup_steps):
        assert plan.lr(step) == pytest.approx(plan.peak_lr * (step + 1) / plan.warmup_steps)
    if plan.warmup_steps:
        assert plan.factor(plan.warmup_steps - 1) == 1


@given(schedules())
def test_rate_stays_between_its_bounds_and_never_rises_after_the_warmup(plan: Schedule) -> None:
    rates = [plan.lr(step) for step in range(plan.total_steps + 5)]
    assert max(rates) <= plan.peak_lr
    course = rates[plan.warmup_steps :]
    assert all(later <= earlier for earlier, later in pairwise(course))
    assert min(course) >= plan.peak_lr * plan.final_lr_fraction


@given(schedules())
def test_the_last_step_has_the_final_rate_and_keeps_it(plan: Schedule) -> None:
    fraction = 1.0 if plan.decay == "constant" else plan.final_lr_fraction
    for step in (plan.total_steps - 1, plan.total_steps, 10 * plan.total_steps):
        assert plan.lr(step) == plan.peak_lr * fraction


@given(schedules())
def test_the_rate_never_jumps_more_than_its_decay(plan: Schedule) -> None:
    steepest = math.pi / 2 / max(1, plan.decay_steps)
    for step in range(max(0, plan.warmup_steps - 1), plan.total_steps - 1):
        assert plan.factor(step) - plan.factor(step + 1) <= steepest + 1e-12


def test_cosine_is_half_way_down_in_the_middle() -> None:
    plan = schedule(max_steps=101, final_lr_fraction=0.1)
    assert plan.factor(50) == pytest.approx(0.55)
    assert plan.factor(25) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_wsd_stays_at_the_peak_and_falls_in_the_last_share_of_the_run() -> None:
    plan = schedule(warmup_steps=10, decay="wsd", decay_fraction=0.2, final_lr_fraction=0.0)
    assert [plan.factor(step) for step in (9, 50, 79)] == [1, 1, 1]
    assert [plan.factor(step) for step in (80, 89, 99)] == pytest.approx([0.95, 0.5, 0])


def test_constant_never_falls() -> None:
    plan = schedule(decay="constant", final_lr_fraction=0.0)
    assert {plan.factor(step) for step in range(200)} == {1.0}


def test_the_schedule_is_computed_without_torch() -> None:
    code = "import sys, lockstep_gpt.training.schedule; exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
