"""Names of other projects: our answers are in docs/lightning.md, and name what exists here."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from lockstep_gpt import cli
from lockstep_gpt.config import OPEN_GROUPS, Config, groups
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.inference import generate
from lockstep_gpt.launch.other_names import NAMES, our_name

FILE = Path(__file__).parents[2] / "docs/lightning.md"
PAGE = FILE.read_text(encoding="utf-8") if FILE.is_file() else ""
TRAINERS = ", ".join(sorted(yaml_files("trainer")))
SECTION = PAGE.partition("\n## Names of other projects\n")[2].partition("\n### ")[0]
ROWS = re.findall(r"^\| (.+) \| (`.+) \|$", SECTION, flags=re.MULTILINE)  # ours, theirs


def settings_of(groups_and_top):
    """Return every name that can be on the left of `=`."""
    names = {item.name for item in dataclasses.fields(Config)}
    for group, owner in groups_and_top.items():
        names |= {f"{group}.{item.name}" for item in dataclasses.fields(owner)}
    for group in OPEN_GROUPS:
        for file in yaml_files(group).values():
            for key, value in (yaml.safe_load(file.read_text("utf-8")) or {}).items():
                below = value if isinstance(value, dict) else {}
                names |= {f"{group}.{key}", *(f"{group}.{key}.{child}" for child in below)}
    return names | {"data.path", "data.tokenizer"}


KNOWN = settings_of(groups())


@pytest.mark.parametrize("ours", [ours for ours, _ in ROWS])
def test_each_of_our_names_on_the_page_exists(ours):
    for word in re.findall(r"`([^`]+)`", ours):
        name, _, chosen = word.removeprefix("+").partition("=")
        if chosen and yaml_files(name):
            assert set(re.findall(r"\w+", chosen)) <= set(yaml_files(name)), word
        elif not re.match(r"(generate )?--|metrics\.csv$|val/loss$|\+callbacks\.stop", word):
            assert name in KNOWN | {*cli.COMMANDS}, word


@pytest.mark.skipif(not SECTION, reason="no such section in docs/lightning.md here")
def test_page_and_messages_agree():
    named = ((re.findall(r"`(?:\w+=)?([^`]+)`", names), ours) for ours, names in ROWS)
    on_page = {name: ours for names, ours in named for name in names}
    known = {name: set(re.findall(r"[\w./]+", NAMES[name])) for name in on_page if name in NAMES}
    assert len(known) > 50
    assert {*NAMES} - {*on_page} == {"paths"}  # the page contains its settings
    flags = {f"--{name}" for name in generate.OTHER_NAMES}
    assert flags - {*on_page} == {"--out_dir", "--top_k"}  # the dash is all that differs
    for name, words in known.items():
        settings = words & KNOWN
        assert settings <= set(re.findall(r"[\w./]+", on_page[name])), name


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("ckpt_path=a.ckpt", "unknown setting ckpt_path; use resume"),
        ("tags=[a]", "unknown setting tags; use logger.wandb.tags"),
        ("debug=default", "unknown setting debug; use experiment=debug"),
        ("epochs=3", "unknown setting epochs; use max_steps or max_tokens"),
        ("max_epochs=3", "unknown setting max_epochs; use max_steps or max_tokens"),
        ("lr=0.1", "unknown setting lr; did you mean optim.lr?"),
        ("learning_rate=0.1", "unknown setting learning_rate; use optim.lr"),
        ("optim.learning_rate=1", "unknown setting optim.learning_rate; use optim.lr"),
        (
            "config/train_gpt2.py",
            "config/train_gpt2.py has no value; write NAME=VALUE, without spaces; a file of "
            "settings in configs/experiment/ is chosen with experiment=NAME",
        ),
        (
            "data.batch_size=8",
            "unknown setting data.batch_size; use batch.micro_size or batch.global_size",
        ),
        ("data.file=a.txt", "unknown setting data.file; use data.path"),
        ("model.optimizer.lr=1", "unknown setting model.optimizer; use optim"),
        (
            "trainer=ddp",
            f"trainer=ddp is not one of {TRAINERS}; use strategy=ddp with trainer.devices",
        ),
        (
            "+experiment=smoke",
            "+experiment=smoke: experiment already has a choice; write experiment=smoke, without +",
        ),
        (
            "--experiment=smoke",
            "--experiment=smoke is not a flag; settings are NAME=VALUE, without dashes; write "
            "experiment=CHOICE",
        ),
        (
            "--max_steps=5",
            "--max_steps=5 is not a flag; settings are NAME=VALUE, without dashes; did you mean "
            "max_steps?",
        ),
        (
            "--train.micro-batch-size",
            "--train.micro-batch-size is not a flag; settings are NAME=VALUE, without dashes; "
            "use batch.micro_size",
        ),
    ],
)
def test_another_project_s_name_is_rejected_in_one_line_with_ours(word, line, capsys):
    assert cli.main(["train", word]) == 2
    assert capsys.readouterr().err == f"lockstep-gpt train: {line}\n"


def test_an_unknown_name_is_not_another_project_s():
    assert our_name("zzz") is our_name("") is None
