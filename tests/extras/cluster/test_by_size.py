"""`model=auto` on a command line: what it decides, what the user keeps, what is rejected."""

import re

import pytest
import yaml

from lockstep_gpt import cli
from lockstep_gpt.extras.cluster.rules import rules
from lockstep_gpt.settings import as_typed


@pytest.fixture
def composed(capsys):
    """Return the configuration of a command line as plain values."""

    def compose(*words):
        assert cli.main(["train", *words, "--cfg", "job", "--resolve"]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return compose


def values_of(config, names):
    settings = {}
    for name in names:
        group, _, key = name.rpartition(".")
        settings[name] = (config[group] if group else config)[key]
    return settings


@pytest.mark.parametrize("words", [[], ["experiment=smoke"], ["experiment=gpt2_124m"]])
def test_the_rules_stand_above_every_experiment(words, composed):
    wanted = rules("300k", 64)
    config = composed("model=auto", *words, "size.weights=300k")
    assert values_of(config, wanted) == wanted
    assert config["model"]["ngram_rows"] == 4096


def test_settings_on_the_command_line_override_the_rules(composed):
    config = composed("optim.lr=0.01", "model=auto", "batch.global_size=64", "model.n_layer=7")
    assert (config["optim"]["lr"], config["batch"]["global_size"]) == (0.01, 64)
    assert config["model"]["n_layer"] == 7
    assert config["batch"]["reference_size"] == rules("1M", 64)["batch.global_size"]


def test_the_rates_of_another_optimizer_are_its_own(composed):
    config = composed("model=auto", "optim=adamw")
    assert config["optim"] == composed("optim=adamw")["optim"]
    assert config["max_tokens"] == rules("1M", 64)["max_tokens"]


@pytest.mark.parametrize(
    ("word", "other"),
    [("max_steps=9", "max_tokens"), ("optim.warmup_steps=3", "optim.warmup_tokens")],
)
def test_a_budget_in_steps_replaces_one_in_tokens(word, other, composed):
    assert values_of(composed("model=auto", word), [other]) == {other: None}
    assert values_of(composed("model=auto", "max_tokens=4096"), ["max_steps"]) == {
        "max_steps": None
    }


def test_the_rules_follow_the_context(composed):
    wanted = rules("10M", 256)
    config = composed("model=auto", "size.weights=10M", "model.block_size=256")
    assert values_of(config, wanted) == wanted


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["model=auto", "size.weights=1X"],
            "size.weights=1X is not a number of weights from 10k to",
        ),
        (["size.weights=2M"], "size.weights=2M needs model=auto; add that"),
        (["model=gpt2", "size.weights=2M"], "size.weights=2M needs model=auto; add that"),
        (["model=auto", "model.block_size=none"], "model.block_size=none must be a whole number"),
        (["model=auto", "-m", "size.weights=1M,2M", "resume=auto"], "is a sweep, which resume="),
    ],
)
def test_impossible_settings_fail_in_one_line(words, line, capsys):
    assert cli.main(["train", *words]) == 2
    screen = capsys.readouterr()
    assert (screen.out, screen.err.count("\n")) == ("", 1)
    assert line in screen.err


def test_each_job_of_a_sweep_over_sizes_has_its_own_rules(command):
    done = command.train(
        "model=auto",
        "--multirun",
        "size.weights=10k,20k",
        "max_steps=1",
        "optim.warmup_steps=0",
        "val_every=1",
        "run_dir=runs/sizes",
    )
    for job, size in enumerate(("10k", "20k")):
        assert re.search(
            rf"^job {job}: (launch\.inline=True )?size\.weights={size}$", done.stdout, re.MULTILINE
        )
        frozen = yaml.safe_load((command.folder / f"runs/sizes/{job}/config.yaml").read_text())
        wanted = {**rules(size, 64), "max_tokens": None, "max_steps": 1}
        wanted.update({"optim.warmup_tokens": None, "optim.warmup_steps": 0})
        assert values_of(frozen, wanted) == wanted, as_typed(frozen)


def test_the_same_command_resumes_its_run(command):
    words = ["model=auto", "size.weights=10k", "run_dir=runs/sized", "resume=auto"]
    first = command.train(*words).stdout
    assert "10k: 9,408 weights in blocks of width 28" in first
    assert "runs/sized is done after step " in command.train(*words).stdout
