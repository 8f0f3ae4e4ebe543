"""The how-to for another model: its one file, next to our source, trains on two ranks."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from lockstep_gpt import cli
from lockstep_gpt.model.model_settings import ModelConfig

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/own_model.md"
if not FILE.is_file():
    pytest.skip("no docs/own_model.md here", allow_module_level=True)
PAGE = FILE.read_text(encoding="utf-8")
((PLACE, CODE),) = re.findall(
    r"^`(\S+)`:\n\n```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL
)
COMMANDS = [
    words
    for words in re.findall(r"^lockstep-gpt (.+)$", PAGE, flags=re.MULTILINE)
    if words.split()[0] in cli.COMMANDS
]
SHAPE = ModelConfig(block_size=16, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of source and configs with the page's model in it."""
    root = tmp_path_factory.mktemp("own")
    for name in ("src", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / PLACE).write_text(CODE, encoding="utf-8")
    return root


@pytest.fixture
def model(copy):
    spec = importlib.util.spec_from_file_location("own", copy / PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1)
    return module.GPT(SHAPE, 50).double()


def test_the_page_s_model_sees_no_later_token(model):
    tokens = torch.randint(50, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_page_s_model_starts_near_the_loss_of_guessing(model):
    tokens, targets = torch.randint(50, (2, 8, 16))
    assert model(tokens, targets).item() == pytest.approx(3.9, abs=0.2)  # ln 50


# Runs commands one after another in one process, which imports the copy; prints their output.
TELL = """
import json, sys
from lockstep_gpt import cli
for words in json.loads(sys.argv[1]):
    assert cli.main(words) == 0, words
    print("=" * 80, flush=True)
"""


def test_the_page_s_commands_train_generate_and_evaluate_it(copy, command, python_of_forks):
    train, generate, *evaluate = COMMANDS
    alone = train.replace("trainer.devices=2", "trainer.devices=1").replace(
        "runs/retention", "runs/alone"
    )
    own = f" data.root={command.data_root} logger=none precision=64-true"
    lines = [train + own, generate, *evaluate, f"{alone}{own} launch.inline=true"]
    words = [python_of_forks, "-c", TELL, json.dumps([*map(shlex.split, lines)])]
    process = command.start_words(words, PYTHONPATH=str(copy / "src"))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    trained, generated, *evaluated, _, _ = out.split("=" * 80 + "\n")
    assert "2 x cpu" in trained
    assert generated.startswith("def f(x, y):")
    assert all("perplexity" in each for each in evaluated)
    one, two = (command.summary(f"runs/{name}") for name in ("alone", "retention"))
    assert one["val_loss"] == pytest.approx(two["val_loss"], abs=1e-10)
    saved = torch.load(
        two["last_checkpoint"]
        if Path(two["last_checkpoint"]).is_absolute()
        else command.folder / two["last_checkpoint"]
    )
    assert "model.blocks.0.qkvg.weight" in saved["state_dict"]
