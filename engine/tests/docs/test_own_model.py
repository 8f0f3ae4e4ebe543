"""The page's model, and one that shares nothing with ours, train in a copy of the project."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from lockstep.commands import table

ROOT = Path(__file__).parents[3]
(PAGE,) = re.findall(
    r"^## A model\n(.*?)^## ",
    (ROOT / "docs/own_model.md").read_text("utf-8"),
    flags=re.MULTILINE | re.DOTALL,
)
(PLACE, CODE), (RECIPE, _) = FILES = re.findall(
    r"^`(\S+)`:\n\n```\w+\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL
)
# Has the parts in the page's table, and is no subclass of our GPT.
BIGRAMS_RECIPE = """
_target_: lockstep_gpt.bigrams.Bigrams
_partial_: true
block_size: 32
"""
BIGRAMS = """
import torch
import torch.nn.functional as F
from torch import nn

class Bigrams(nn.Module):
    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.blocks = nn.ModuleList([nn.Embedding(vocab_size, vocab_size)])
        nn.init.zeros_(self.blocks[0].weight)

    def forward(self, tokens, targets=None):
        logits = self.blocks[0](tokens.long())
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())

    def generate(self, tokens, length, temperature=1.0, top_k=None, generator=None):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens[:, -1:])[:, 0].argmax(-1, True)], dim=1)
        return tokens

    @property
    def flops_per_token(self):
        return 6 * self.vocab_size
"""
COMMANDS = [
    words
    for words in re.findall(r"^lockstep-gpt (.+)$", PAGE, flags=re.MULTILINE)
    if words.split()[0] in table()
]
SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of source and configs with the page's model in it, and the other one."""
    root = tmp_path_factory.mktemp("own")
    for name in ("src", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for place, content in FILES:
        (root / place).write_text(content, encoding="utf-8")
    (root / PLACE).with_name("bigrams.py").write_text(BIGRAMS, encoding="utf-8")
    (root / RECIPE).with_name("bigrams.yaml").write_text(BIGRAMS_RECIPE, encoding="utf-8")
    return root


@pytest.fixture
def model(copy):
    spec = importlib.util.spec_from_file_location("own", copy / PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1)
    return module.RetentionGPT(50, **SHAPE).double()


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
import lockstep_gpt
from lockstep import commands as cli
from lockstep.commands import table
for words in json.loads(sys.argv[1]):
    assert cli.main(words) == 0, words
    print("=" * 80, flush=True)
"""


@pytest.mark.slow
def test_the_page_s_commands_train_generate_and_evaluate_it(copy, command, python_of_forks):
    train, generate, *evaluate = COMMANDS
    alone = train.replace("trainer.devices=2", "trainer.devices=1").replace(
        "runs/retention", "runs/alone"
    )
    own = f" data.root={command.data_root} logger=none precision=64-true"
    bigrams = alone.replace("=retention", "=bigrams").replace("runs/alone", "runs/bigrams")
    bigrams += " ~model.n_layer ~model.n_head ~model.n_embd"  # which the experiment sets
    lines = [train + own, generate, *evaluate]
    lines += [f"{line}{own} launch.inline=true" for line in (alone, bigrams)]
    words = [python_of_forks, "-c", TELL, json.dumps([*map(shlex.split, lines)])]
    process = command.start_words(words, PYTHONPATH=f"{copy / 'src'}:{ROOT / 'engine/src'}")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    trained, generated, *evaluated, _, _, _ = out.split("=" * 80 + "\n")
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
    assert "model.blocks.0.attention.qkvg.weight" in saved["state_dict"]
    assert command.summary("runs/bigrams")["val_loss"] < 5.53  # it starts at ln 256 = 5.545
