"""The page on extensions: in a copy of the project, its files and changes do what it says."""

import csv
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from lockstep_gpt.config import Config, data_sources, groups

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
CHANGES = re.findall(r"^In `(\S+)`.+?```diff\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^lockstep-gpt (.+)$", PAGE, flags=re.MULTILINE)
# Runs commands one after another in one process, which imports the copy.
TELL = """
import json, sys
from lockstep_gpt import cli
print("=", *[cli.main(words) for words in json.loads(sys.argv[1])])
"""


def changed(text, difference):
    """Apply a diff to a text, in which it must fit exactly once."""
    lines = difference.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    assert text.count(old) == 1, old
    return text.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of source and configs with all changes of the page."""
    root = tmp_path_factory.mktemp("own")
    for name in ("src", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for place, content in FILES:
        assert not (root / place).exists()
        (root / place).write_text(content, encoding="utf-8")
    for place, difference in CHANGES:
        text = (root / place).read_text(encoding="utf-8")
        (root / place).write_text(changed(text, difference), encoding="utf-8")
    return root


def test_the_page_s_commands_do_what_the_page_says(copy, command, python_of_forks):
    assert (len(FILES), len(CHANGES), len(COMMANDS)) == (5, 2, 5)
    own = f" data.root={command.data_root} logger=none launch.inline=true callbacks.sample.length=9"
    alone = f"{own} trainer.accelerator=cpu trainer.devices=1"
    wrong = "train experiment=smoke model.embedding_dropout=1"
    words = [*(shlex.split(line + alone) for line in COMMANDS), shlex.split(wrong)]
    process = command.start_words(
        [python_of_forks, "-c", TELL, json.dumps(words)], PYTHONPATH=str(copy / "src")
    )
    out, err = process.communicate(timeout=240)
    assert out.splitlines()[-1] == "= 0 0 0 0 0 2", out + err
    assert err.splitlines()[-1].endswith("model.embedding_dropout=1.0 must be below 1")
    ends = {name: command.summary(f"runs/{name}") for name in ("wider", "norm", "bound", "sums")}
    assert [end["step"] for end in ends.values()] == [20, 20, 5, 20]
    assert ends["bound"]["status"] == "stopped early"
    with (command.folder / "runs/norm/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["trainer/step"]) for row in rows] == [5, 10, 15, 20]
    assert all(float(row["weights/norm"]) > 1 for row in rows)
    assert "embedding_dropout: 0.2" in (command.folder / "runs/dropout/config.yaml").read_text()


def test_every_setting_is_read_somewhere():
    files = [path for path in (ROOT / "src").rglob("*.py") if path.name != "config.py"]
    sources = "\n".join(path.read_text("utf-8") for path in files)
    owners = {Config, *groups().values(), *data_sources().values()}
    names = {item.name for owner in owners for item in dataclasses.fields(owner)}
    read = {*re.findall(r"\.(\w+)", sources), *re.findall(r"\[?\"(\w+)\"", sources)}
    assert names - read == set()
