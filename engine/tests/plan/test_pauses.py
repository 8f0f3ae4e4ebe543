"""How much of a run goes into validation and saving."""

import pytest

from lockstep.plan.experiment import predicted
from lockstep.plan.hardware import HARDWARE
from lockstep.plan.table import as_text

H100 = HARDWARE["h100"]


@pytest.fixture
def pauses_of(composed):
    """Return the pauses of a run of that many steps on two devices, and its plan."""

    def pauses(steps, *overrides):
        words = ("experiment=smoke", f"max_steps={steps}", *overrides)
        config = composed(*words)
        plan = predicted(config, H100, (2,), samples=steps * config.batch.global_size)
        return plan.rows[0].pauses, plan

    return pauses


@pytest.mark.parametrize(
    ("steps", "overrides", "validations", "saves"),
    [
        (12, ("val_every=4", "checkpoint.every=4"), 3, 3),
        (12, ("val_every=4", "checkpoint.every=6"), 3, 3),  # after 6, 8, and 12 steps
        (12, ("val_every=4", "checkpoint.every=6", "checkpoint.keep_best=0"), 3, 2),
        (13, ("val_every=4", "checkpoint.every=6", "checkpoint.keep_best=0"), 4, 3),
        (13, ("val_every=20", "checkpoint.every=null"), 1, 1),
    ],
)
def test_each_step_is_saved_once(pauses_of, steps, overrides, validations, saves):
    pauses, _ = pauses_of(steps, *overrides)
    assert (pauses.validations, pauses.saves) == (validations, saves)


def test_the_counts_are_those_of_a_real_run(pauses_of, command):
    words = ("max_steps=12", "val_every=4", "checkpoint.every=6", "checkpoint.keep_last=12")
    command.train(*words, "checkpoint.keep_best=0", "run_dir=run")
    saved = [*(command.folder / "run/checkpoints").glob("*.ckpt")]
    pauses, _ = pauses_of(12, *words, "checkpoint.keep_best=0")
    rows = (command.folder / "run/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val/loss")
    validated = [row for row in rows[1:] if row.split(",")[column]]
    assert (pauses.validations, pauses.saves) == (len(validated), len(saved))


def test_a_save_copies_the_state_and_waits_for_the_disk_unless_in_background(composed):
    config = composed("experiment=smoke", "optim=adamw")
    plan = predicted(config, H100, (1,))
    size = 3 * plan.gradient_bytes  # weights, and two moments of the same size
    copied = size / H100.host_link.bandwidth
    row = plan.rows[0]
    assert row.pauses.save == pytest.approx(copied + size / H100.disk)
    config.checkpoint.background = True
    assert predicted(config, H100, (1,)).rows[0].pauses.save == pytest.approx(copied)


def test_a_validation_is_the_forward_pass_of_its_tokens_on_all_devices(pauses_of):
    small, plan = pauses_of(12, "val_tokens=65536")
    large, _ = pauses_of(12, "val_tokens=655360")
    assert large.validation == pytest.approx(10 * small.validation, rel=0.01)
    row = plan.rows[0]
    one_batch = row.batch.global_size * plan.tokens.per_sample
    assert small.validation == pytest.approx(65536 / one_batch * row.time.compute / 3, rel=0.01)
    assert small.share(row.seconds) < large.share(row.seconds) < 1
    assert f"{small.share(row.seconds):.1%}" in as_text(plan)


def test_without_a_limit_the_length_of_a_validation_is_unknown(pauses_of):
    unknown, plan = pauses_of(12, "val_tokens=null")
    assert unknown.validation is None
    assert "of unknown length, because val_tokens is null" in as_text(plan)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["gpt2_124m", "modern_124m"])
def test_the_presets_validate_and_save_in_at_most_3_percent_on_8_gpus(composed, experiment):
    config = composed(f"experiment={experiment}")
    run = {"samples": config.max_steps * config.batch.global_size, "vocab_size": 50_257}
    (row,) = predicted(config, H100, (8,), **run).rows
    in_background = row.pauses.share(row.seconds)
    assert in_background <= 0.03
    config.checkpoint.background = False
    (row,) = predicted(config, H100, (8,), **run).rows
    assert row.pauses.share(row.seconds) > 1.5 * in_background
