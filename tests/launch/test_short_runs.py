"""A run that is shorter than the warmup of its preset."""

import math

import pytest

from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.short_runs import fit_warmup
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training.schedule import plan_batch, plan_schedule

LINE = "optim.warmup_steps=5, which is not from the command line, takes all of this run of 3 steps"


def fitted(composed, *words):
    """Return the settings of a new run of `words` on one device, its batch, and its schedule."""
    config = composed(*words)
    batch = plan_batch(config.batch, config.model.block_size, 1, 1)
    values, config = fit_warmup({"optim": vars(config.optim)}, config, batch, words)
    assert values["optim"] == vars(config.optim)
    return config, batch, plan_schedule(config, batch)


@pytest.mark.parametrize("preset", ["debug", "gpt2_124m", "modern_124m", "quickstart", "smoke"])
def test_each_preset_can_be_tried_for_three_steps(composed, preset):
    assert preset in yaml_files("experiment")
    _, _, schedule = fitted(composed, f"experiment={preset}", "trainer=cpu", "max_steps=3")
    assert (schedule.total_steps, schedule.warmup_steps) == (3, 0)
    assert schedule.lr(0) == schedule.peak_lr


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (256, 25), (257, 256)])
def test_a_warmup_as_long_as_the_run_becomes_a_tenth_of_it(composed, steps, warmup):
    words = ("experiment=gpt2_124m", "trainer=cpu", f"max_steps={steps}")
    assert fitted(composed, *words)[2].warmup_steps == warmup


def test_a_warmup_in_tokens_becomes_a_tenth_in_tokens(composed, tmp_path):
    (tmp_path / "experiment").mkdir()
    optim = "optim: {warmup_steps: null, warmup_tokens: 100000}"
    text = f"# @package _global_\ndefaults:\n  - smoke\n{optim}\n"
    (tmp_path / "experiment/of_this_test.yaml").write_text(text)
    words = ("--config-dir", str(tmp_path), "experiment=of_this_test", "max_steps=null")
    config, batch, schedule = fitted(composed, *words, "max_tokens=99999")
    steps = math.ceil(99_999 / batch.tokens_per_step)
    assert (schedule.total_steps, schedule.warmup_steps) == (steps, steps // 10)
    assert config.optim.warmup_tokens == steps // 10 * batch.tokens_per_step


def test_a_typed_warmup_as_long_as_the_run_is_refused(composed):
    with pytest.raises(UserError, match="makes 5 steps of warmup, but the run has only 3; lower"):
        fitted(composed, "experiment=smoke", "max_steps=3", "optim.warmup_steps=5")


def test_a_quick_try_says_so_and_can_be_continued_for_longer(command):
    words = ("run_dir=run", "resume=auto")
    out = command.train(*words, "max_steps=3").stdout
    assert f"{LINE}; it is now 0, a tenth of the run; to choose it, set optim.warmup_steps" in out
    assert "0 steps = 0 tokens of warmup" in out
    frozen = RunDirectory(command.folder / "run").load()
    assert (frozen.max_steps, frozen.optim.warmup_steps) == (3, 0)
    assert "run is done" in command.train(*words, "max_steps=3").stdout
    out = command.train(*words, "max_steps=30").stdout  # its preset's warmup would now fit
    assert "resuming run\n  max_steps: 3 -> 30\n" in out
    assert "0 steps = 0 tokens of warmup" in out
    err = command.train("run_dir=other", "max_steps=3", "optim.warmup_steps=4", status=2).stderr
    assert "optim.warmup_steps=4 makes 4 steps of warmup, but the run has only 3" in err


def test_each_job_of_a_sweep_has_a_warmup_that_fits(command):
    words = ("--multirun", "max_steps=3,12", "run_dir=sweep", "checkpoint.every=null")
    out = command.train(*words).stdout
    assert out.count("which is not from the command line") == 1
    jobs = [RunDirectory(command.folder / f"sweep/{job}").load().optim for job in (0, 1)]
    assert [optim.warmup_steps for optim in jobs] == [0, 5]
