"""The how-to: its commands run one after another, exactly as written."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs/after_the_run.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))
PAGE = SECTIONS["Export it"] + SECTIONS["Start from existing weights"]
COMMANDS = [
    "train experiment=smoke run_dir=runs/example",  # the page's first
    *re.findall(r"^lockstep-gpt (.+)$", PAGE, flags=re.MULTILINE),
]
RUNS = re.findall(r"run_dir=(\S+)", PAGE)
# The shape of a GPT-2 that takes a second to create and has what the page relies on.
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32}
IN_SMALL = [f"model.{name}={size}" for name, size in SMALL.items()]


def block(language):
    """Return the blocks of code in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def a_gpt2(folder, tokenizer):
    """Save a folder that looks like a downloaded GPT-2."""
    config = GPT2Config(vocab_size=tokenizer.vocab_size, n_positions=512, **SMALL)
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_dict()["json"], encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_commands_run_one_after_the_other(command, capsys, monkeypatch, learnt):
    if "tokenizer=gpt2" in PAGE:
        a_gpt2(command.folder / "gpt2", learnt(300, [PAGE]))
    (command.folder / "books").mkdir()
    (command.folder / "books/one.txt").write_text(PAGE * 30, encoding="utf-8")
    for line in COMMANDS:
        short = [f"data.root={command.data_root}", "callbacks.sample.length=9"]
        more = short if line.startswith("train") else []
        if "model=gpt2" in line:
            more = [*more, *IN_SMALL, "max_steps=10"]
        command(*shlex.split(line), *more)
    assert command.summary(RUNS[-1])["status"] == "done"
    monkeypatch.chdir(command.folder)
    capsys.readouterr()
    exec(block("python")[0])
    assert capsys.readouterr().out.startswith("import")
    _evaluate(command)


def _evaluate(command):
    """Run the page's evaluation if its program is installed."""
    if not importlib.util.find_spec("lm_eval"):
        return
    (command.folder / "tasks").mkdir()
    for name, language in (("python.jsonl", "json"), ("python.yaml", "yaml")):
        (command.folder / "tasks" / name).write_text(block(language)[0], encoding="utf-8")
    (line,) = re.findall(r"^lm_eval (.+)$", PAGE, flags=re.MULTILINE)
    words = [sys.executable, "-m", "lm_eval", *shlex.split(line)]
    process = command.start_words(words, HF_DATASETS_OFFLINE="1")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "|python" in out


def test_every_file_of_an_export_is_in_the_table(folder_of, shaped, bpe):
    folder = folder_of(shaped(vocab_size=bpe.vocab_size), bpe)
    files = set(re.findall(r"`([\w.]+)`", PAGE.split("| file |")[1].split("\n\n")[0]))
    assert {path.name for path in folder.iterdir()} <= files
