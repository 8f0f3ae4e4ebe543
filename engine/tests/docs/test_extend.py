"""An owner's own parts: in a copy of the project, files and changes of pages do what they say."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def section(page, title):
    """Return a section of a page, in the names of this project."""
    text = (ROOT / page).read_text("utf-8").replace("my_gpt", "lockstep_gpt")
    pattern = rf"^## {title}\n.*?(?=^## |\Z)"
    (found,) = re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
    return found.replace("my-gpt", "lockstep-gpt")


# test_own_model.py is about the section on models.
OWN_MODEL = (ROOT / "docs/own_model.md").read_text("utf-8")
PAGE = OWN_MODEL.replace(section("docs/own_model.md", "A model"), "")
PAGE += section("docs/own_data.md", "Your own format")
PAGE += section("docs/own_data.md", "A LightningDataModule")
PAGE += section("engine/docs/tokens.md", "A tokenizer")
FILES = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
CHANGES = re.findall(r"^In `(\S+)`.+?```diff\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^lockstep-gpt (?!check)(.+)$", PAGE, flags=re.MULTILINE)
OF_CHANGES = [line for line in COMMANDS if "model." in line]
OF_FILES = [line for line in COMMANDS if line not in OF_CHANGES]
# Runs commands one after another in one process, which imports the copy.
TELL = """
import json, sys
import lockstep_gpt
from lockstep import commands as cli
print("=", *[cli.main(words) for words in json.loads(sys.argv[1])])
"""

# The reader's own classes.
MINE = """
import lightning, torch
from torch import nn
class Module(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.net, self.lr = nn.Linear(4, 2), lr
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch), (batch.sum(1) > 0).long())
    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self.net(batch).argmax(1) == (batch.sum(1) > 0)).float().mean())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)
class Data(lightning.LightningDataModule):
    def __init__(self, batch):
        super().__init__()
        self.micro_size = batch.micro_size
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(512, 4), self.micro_size)
    val_dataloader = train_dataloader
"""


def changed(text, difference):
    """Apply a diff to a text; return it as it is if it has the change, None if that can't fit."""
    lines = difference.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    if new in text:
        return text
    return text.replace(old, new) if text.count(old) == 1 else None


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of source and configs, in which tests may replace your own files."""
    root = tmp_path_factory.mktemp("own")
    for name in ("src", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def ends(copy, command, python_of_forks):
    """Return a function that runs lines in the copy; it returns their statuses, and the errors."""
    alone = " logger=none launch.inline=true callbacks.sample.length=9"
    alone += " trainer.accelerator=cpu trainer.devices=1"

    def words_of(line):
        """Return the words of a line; a data module of one's own has no folder of tokens."""
        if line.startswith("evaluate"):
            return shlex.split(line)
        is_own = "data=counting" in line or "experiment=mine" in line
        root = "" if is_own else f" data.root={command.data_root}"
        return shlex.split(line + alone + root)

    def run(lines):
        words = json.dumps([words_of(line) for line in lines])
        process = command.start_words(
            [python_of_forks, "-c", TELL, words], PYTHONPATH=f"{copy / 'src'}:{ROOT / 'engine/src'}"
        )
        out, err = process.communicate(timeout=240)
        return out.splitlines()[-1], err

    return run


@pytest.mark.slow
def test_the_page_s_files_do_what_the_page_says(copy, command, ends):
    assert (len(FILES), len(OF_FILES)) == (15, 11)
    (command.folder / "mine.py").write_text(MINE)
    for place, content in FILES:
        (copy / place).write_text(content, encoding="utf-8")
    statuses, err = ends(OF_FILES)
    assert statuses == "=" + " 0" * len(OF_FILES), err
    names = re.findall(r"run_dir=runs/(\S+)", "\n".join(OF_FILES))
    runs = {name: command.summary(f"runs/{name}") for name in names}
    assert {name: run["step"] for name, run in runs.items() if run["step"] != 20} == {"bound": 5}
    assert runs["bound"]["status"] == "stopped early"
    with (command.folder / "runs/norm/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["trainer/step"]) for row in rows] == [5, 10, 15, 20]
    assert all(float(row["weights/norm"]) > 1 for row in rows)
    with (command.folder / "runs/accuracy/metrics.csv").open() as file:
        accuracies = [float(row["val/accuracy"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert len(accuracies) == 2
    assert 0 < accuracies[-1] < 1
    assert runs["mine"]["monitor"] == "val/acc"
    assert 0 <= runs["mine"]["best_value"] <= 1
    frozen = (command.folder / "runs/characters/config.yaml").read_text()
    assert "tokenizer: lockstep_gpt.characters.Characters" in frozen
    assert runs["counting"]["val_loss"] < 2.2  # of ln 10 = 2.3
    radam = (command.folder / "runs/radam/config.yaml").read_text()
    assert "_target_: torch.optim.RAdam" in radam
    assert "weight_decay: 0.01" in radam  # an argument that no YAML file lists
    assert runs["radam"]["val_loss"] < 5.5  # of ln 256 = 5.55


@pytest.mark.slow
def test_the_page_s_changes_do_what_the_page_says(copy, command, ends):
    assert (len(CHANGES), len(OF_CHANGES)) == (2, 1)
    for place, difference in CHANGES:
        text = changed((copy / place).read_text(encoding="utf-8"), difference)
        if text is None:
            pytest.fail(f"{place} no longer has the lines that the page changes")
        (copy / place).write_text(text, encoding="utf-8")
    wrong = "train experiment=smoke model.embedding_dropout=1"
    statuses, err = ends([*OF_CHANGES, wrong])
    assert statuses == "= 0 2", err
    assert err.splitlines()[-1].endswith("model.embedding_dropout=1 must be below 1")
    assert "embedding_dropout: 0.2" in (command.folder / "runs/dropout/config.yaml").read_text()
