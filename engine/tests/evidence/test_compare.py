"""The real command: pairs of runs, a verdict, and its answers to signals and mistakes."""

from __future__ import annotations

import json
import re
import shutil
import signal
from functools import partial

import pytest
import yaml
from lockstep_gpt import PROJECT

PROGRAM = PROJECT.program

VARIANT = ("--variant", "optim.lr=4e-3")
RUNS = ("--runs", "pairs/base/*", "pairs/lr-4e-3/*")
VERDICT = re.compile(
    r"^lr[=-]4e-3 is better than base by 0\.\d+ nats \(95% CI 0\.\d+ to 0\.\d+\), 4 pairs; "
    r"at this noise 0\.01 needs \d+ pairs$",
    re.MULTILINE,
)


@pytest.fixture
def copied(compared, command):
    """The command in a folder with a copy of the finished comparison."""
    shutil.copytree(compared[0].folder / "pairs", command.folder / "pairs")
    return command


@pytest.mark.slow
def test_runs_in_pairs_end_in_a_verdict_that_one_can_quote(compared, losses_in):
    command, printed = compared
    folder = command.folder / "pairs"
    verdict = VERDICT.search(printed)[0]
    sides = ("base", "lr-4e-3")
    losses = losses_in(folder)
    assert {*losses} == {f"{side}/{seed}" for side in sides for seed in range(1337, 1341)}
    values = json.loads((folder / "compare.json").read_text())
    (variant,) = values["comparisons"][0]["variants"]
    assert variant["verdict"] == verdict
    assert variant["base"] == [losses[f"base/{seed}"] for seed in variant["seeds"]]
    assert variant["low"] < variant["difference"] < variant["high"] < 0
    assert variant["intervals"][2] == [None, None]
    assert verdict in (folder / "compare.html").read_text()
    configs = [yaml.safe_load((folder / side / "1338/config.yaml").read_text()) for side in sides]
    assert [config["seed"] for config in configs] == [1338, 1338]
    assert [config["optim"]["lr"] for config in configs] == [3e-3, 4e-3]


@pytest.mark.slow
def test_its_runs_have_the_losses_of_the_same_runs_alone(compared, command, losses_in):
    """Here, too, where several of them run at the same time."""
    config = yaml.safe_load((compared[0].folder / "pairs/lr-4e-3/1339/config.yaml").read_text())
    names = ("max_steps", "val_every", "log_every")
    words = [f"{name}={config[name]}" for name in names]
    command.train("optim.lr=4e-3", "seed=1339", "run_dir=alone", *words)
    losses = losses_in(compared[0].folder / "pairs")
    assert losses["lr-4e-3/1339"] == command.summary("alone")["val_loss"]


def test_the_same_command_again_trains_nothing(copied, words_of, losses_in):
    before = losses_in(copied.folder / "pairs")
    for log in copied.folder.glob("pairs/*/*.log"):
        log.unlink()
    done = copied(*words_of(copied, *VARIANT))
    assert VERDICT.search(done.stdout)
    assert losses_in(copied.folder / "pairs") == before
    assert not [*copied.folder.glob("pairs/*/*.log")]


def test_another_setting_does_not_use_these_runs(copied, words_of):
    done = copied(*words_of(copied, *VARIANT, "optim.beta2=0.9"), status=2)
    assert done.stderr == (
        f"{PROGRAM} compare: pairs has finished runs of other settings: optim.beta2=0.9 instead "
        "of 0.95; name another --folder\n"
    )


def test_finished_runs_have_the_same_verdict(copied):
    done = copied("compare", *RUNS, "--folder", "page")
    assert VERDICT.search(done.stdout)
    assert (copied.folder / "page/compare.html").is_file()


def test_runs_of_other_measures_are_compared_too(copied):
    measures = [word for name in ("tokens_per_second", "val_loss") for word in ("--measure", name)]
    done = copied("compare", *RUNS, *measures)
    assert re.search(r"in tokens_per_second", done.stdout)
    assert VERDICT.search(done.stdout)


def rewrite(path, change):
    """Replace a file's text by what a function makes of it."""
    path.write_text(change(path.read_text()))


def lose_seeds(folder):
    for seed in (1338, 1340):
        shutil.rmtree(folder / "base" / str(seed))
    for seed in (1337, 1339):
        shutil.rmtree(folder / "lr-4e-3" / str(seed))


def lose_a_seed(folder):
    shutil.rmtree(folder / "base/1337")


def repeat_a_seed(folder):
    shutil.copytree(folder / "base/1337", folder / "base/again")


def stop_a_run(folder):
    path = folder / "base/1337/summary.json"
    rewrite(path, lambda text: text.replace('"status": "done"', '"status": "stopped"'))


def change_the_data(folder):
    for path in folder.glob("base/*/decided.json"):
        change = partial(re.sub, r'"fingerprint": "\w+"', '"fingerprint": "123456789"')
        rewrite(path, change)


def mix_settings(folder):
    path = folder / "base/1339/config.yaml"
    rewrite(path, lambda text: text.replace("beta2: 0.95", "beta2: 0.9"))


def make_equal(folder):
    for path in folder.glob("lr-4e-3/*/config.yaml"):
        rewrite(path, lambda text: text.replace("lr: 0.004", "lr: 0.003"))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lose_seeds, "no seed is in all groups: base has 1337, 1339; lr-4e-3 has 1338, 1340; "),
        (lose_a_seed, "3 common seeds are too few for any answer; train 4"),
        (repeat_a_seed, "pairs/base/1337 and pairs/base/again have seed=1337; "),
        (stop_a_run, "pairs/base/1337 has not finished; "),
        (change_the_data, "pairs/base/1337 and pairs/lr-4e-3/1337 have other data, 12345678 and "),
        (mix_settings, "the runs of base differ in more than the seed: optim.beta2=0.9 instead"),
        (make_equal, "base and lr-4e-3 have the same settings; "),
    ],
)
def test_finished_runs_that_can_not_be_compared_are_refused_in_one_line(damage, line, copied):
    damage(copied.folder / "pairs")
    done = copied("compare", *RUNS, status=2)
    assert done.stderr.startswith(f"lockstep-gpt compare: {line}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--variant", "optim.lr=3e-3"], "base and lr=3e-3 have the same settings; "),
        ([], "compare needs a variant, "),
        ([*VARIANT, "--pairs", "3"], "--pairs=3 are too few for any answer; give at least 4"),
        ([*VARIANT, "--pairs", "-1"], "--pairs=-1 must be above 0"),
        ([*VARIANT, "--confidence", "95"], "--confidence=95.0 must be from 0.5 to below 1"),
        ([*VARIANT, "--tokens", "1e4"], "--tokens=1e+04 is too small for any answer: 4 pairs of "),
        ([*VARIANT, "--at-once", "999"], "--at-once=999 runs don't fit: "),
        (
            [*VARIANT, "--measure", "tokens_per_second", "--at-once", "2"],
            "--at-once=2: runs would slow each other down; leave it out to measure tokens_per_sec",
        ),
        ([*VARIANT, "run_dir=x"], "run_dir=x: compare sets run_dir for each run; remove it"),
        (["--variant", "seed=3"], "seed=3: compare sets seed for each run; remove it"),
        (["--variant", "optim.lrr=1"], "unknown setting optim.lrr; did you mean optim.lr?"),
        ([*VARIANT, "--measure", "seconds_to=x"], "--measure seconds_to=x: 'x' is not a loss; "),
        ([*VARIANT, "--runs", "a", "b"], "--runs compares finished runs; "),
        (
            ["--variant", "data.source.val_fraction=0.1"],
            "val_fraction=0.1 and base have other data, data.source.val_fraction=0.1 instead of ",
        ),
    ],
)
def test_a_comparison_without_an_answer_is_refused_in_one_line(words, line, command, words_of):
    status, _, printed = command.run(*words_of(command, *words))
    assert (status, printed.count("\n")) == (2, 1), printed
    assert printed.startswith(f"lockstep-gpt compare: {line}")
    assert not (command.folder / "pairs").exists()


@pytest.mark.slow
def test_too_few_hours_are_refused_after_a_pair(command, words_of):
    done = command(*words_of(command, *VARIANT, "--hours", "1e-5"), status=2)
    assert done.stderr.startswith(f"{PROGRAM} compare: --hours=1e-05 is too small for any answer")
    assert len([*command.folder.glob("pairs/base/*/summary.json")]) == 1


@pytest.mark.slow
def test_a_failing_variant_ends_the_comparison_in_one_line(command, words_of):
    words = words_of(command, "--variant", "optim.lr=1e9", logger="wandb")
    done = command(*words, "logger.wandb.mode=disabled", status=1)
    assert done.stderr.startswith(f"{PROGRAM} compare: lr=1e9, seed 1337, failed: RunError: step")
    assert done.stderr.endswith("pairs/lr-1e9/1337.log has more; then the same command continues\n")
    assert done.stderr.count("\n") == 1
    for side in ("base", "lr-1e9"):  # of which wandb shows a group
        config = yaml.safe_load((command.folder / f"pairs/{side}/1337/config.yaml").read_text())
        logger = config["logger"]["wandb"]
        assert (logger["group"], logger["tags"]) == ("pairs", [side, "seed-1337"])
        assert config["run_name"] == f"{side}-1337"


@pytest.mark.slow
def test_after_a_signal_the_same_command_continues_to_the_same_losses(
    copied, compared, words_of, losses_in, wait_for
):
    command, words = copied, words_of(copied, *VARIANT)
    folder = command.folder / "pairs"
    for seed in (1339, 1340):  # as if only two of four pairs were trained
        for side in ("base", "lr-4e-3"):
            shutil.rmtree(folder / side / str(seed))
    process = command.start(*words)
    wait_for(lambda: (folder / "base/1339/summary.json").is_file())
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate()
    assert process.returncode == 143, printed
    assert printed.endswith("stopped by SIGTERM; the same command continues\n")
    assert len(losses_in(folder)) < 8
    command(*words)
    assert losses_in(folder) == losses_in(compared[0].folder / "pairs")


@pytest.mark.slow
def test_one_command_at_a_time(command, words_of, wait_for):
    words = words_of(command, *VARIANT)
    process = command.start(*words)
    wait_for(lambda: (command.folder / "pairs/.lock").is_file())
    done = command(*words, status=2)
    assert re.match(rf"{PROGRAM} compare: pairs is in use by process \d+ on ", done.stderr)
    process.send_signal(signal.SIGTERM)
    process.communicate()
