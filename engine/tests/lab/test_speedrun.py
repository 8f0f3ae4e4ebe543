import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

SCRIPT = Path(__file__).parents[3] / "lab/speedrun.py"
RECIPES = sorted((SCRIPT.parent / "speedrun").iterdir())
# After its first section of steps, it knows which byte always follows another in this text.
RECIPE = """
import torch

def prepare(training, seed, nanogpt):
    print("a recipe may print")
    return train(int(training[1]) - int(training[0]))

def train(distance):
    yield 5, lambda tokens: torch.zeros(*tokens.shape, 256)
    yield 10, lambda tokens: 50.0 * torch.nn.functional.one_hot((tokens + distance) % 256, 256)
    raise AssertionError("the target was reached")
"""


@pytest.fixture(scope="module")
def speedrun():
    spec = importlib.util.spec_from_file_location("speedrun", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_is_computed_per_window(speedrun):
    held_out = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    weights = torch.randn(256, 256)
    expected, count = 0.0, 0
    for start in range(0, 1000 - 64, 64):
        window = torch.from_numpy(held_out[start : start + 65].astype(np.int64))
        log_p = weights[window[:-1]].log_softmax(-1)
        expected -= log_p.gather(1, window[1:, None]).sum().item()
        count += 64
    loss = speedrun.held_out_loss(lambda tokens: weights[tokens], held_out)
    assert loss == pytest.approx(expected / count, rel=1e-5)
    flat = speedrun.held_out_loss(lambda tokens: torch.zeros(*tokens.shape, 256), held_out)
    assert flat == pytest.approx(math.log(256))


def test_a_recipe_in_a_file_is_stopped_at_the_target(tmp_path, python_of_forks):
    (tmp_path / "known.py").write_text(RECIPE)
    (tmp_path / "text").write_bytes(bytes(range(0, 256, 2)) * 16)
    words = ["--seeds", "7,8", "--text", tmp_path / "text", "--json", tmp_path / "runs.json"]
    done = subprocess.run(
        [python_of_forks, SCRIPT, tmp_path / "known.py", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [(run["seed"], run["steps"]) for run in runs] == [(7, 10), (8, 10)]
    assert all(run["loss"] < 1e-6 for run in runs)
    assert "known         2/2         10" in done.stdout


def test_the_text_of_all_records_is_that_of_one_python(speedrun, tmp_path):
    if sys.version_info[:3] == (3, 11, 7):
        assert speedrun.standard_text(tmp_path / "text").stat().st_size == speedrun.SIZE
    else:
        with pytest.raises(SystemExit, match=r"records use .* of CPython 3\.11\.7"):
            speedrun.standard_text(tmp_path / "text")


def test_a_missing_recipe_is_reported_with_the_existing_ones(python_of_forks):
    done = subprocess.run([python_of_forks, SCRIPT, "none.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("none.py is neither a file nor one of classic.yaml, modern.yaml")


@pytest.mark.parametrize("path", [path for path in RECIPES if path.suffix == ".yaml"], ids=str)
def test_settings_of_this_version_compose(command, path):
    recipe = yaml.safe_load(path.read_text())
    if "commit" in recipe:  # another version's settings
        assert set(recipe) == {"commit", "settings"}
        return
    words = [f"{name}={value}" for name, value in recipe["settings"].items()]
    status, out, _ = command.run("train", *words, "--cfg", "job")
    assert status == 0
    assert f"lr: {0.001 if path.stem == 'classic' else 0.03}" in out
