"""An owner adds, changes, renames, and deletes files, and the project's tests still pass."""

import shutil
import subprocess

import pytest

# A new file of each kind.
FILES = {
    "configs/callbacks/a_rate.yaml": """\
# Ours.
rate:
  _target_: lightning.pytorch.callbacks.LearningRateMonitor
""",
    "configs/data/books.yaml": """\
# Ours.
defaults:
  - text
  - _self_

source:
  path: /data/books
""",
    "configs/logger/csv.yaml": """\
# Ours.
csv:
  _target_: lightning.pytorch.loggers.CSVLogger
  save_dir: ${run_dir}
""",
    "configs/model/gpt3.yaml": "# Ours.\ndefaults:\n  - nano\n  - _self_\n\nn_layer: 3\n",
    "configs/optim/sgd.yaml": """\
# @package _global_
# Ours.
clip_norm: null
optim:
  _target_: torch.optim.SGD
  _partial_: true
  lr: 0.1
schedule:
  _target_: lockstep.Schedule
""",
    "configs/strategy/deepspeed.yaml": """\
# Ours.
_target_: lightning.pytorch.strategies.DeepSpeedStrategy
stage: 2
""",
    "configs/trainer/tpu.yaml": "# Ours.\ndefaults:\n  - auto\n  - _self_\n\ndevices: 1\n",
    "docs/results.md": """\
# Results

```
make plots
my-gpt train experiment=a_year_of_training
```

![a plot](plots/not_in_git.png)
""",
    "notebooks/plots.ipynb": "{}",
    "README.md": "# My own GPT\n\n```\nmake\nmy-gpt train experiment=a_year_of_training\n```\n",
    "src/my_gpt/own/words.txt": "some words\n",
    "src/my_gpt/own/command.py": """\
\"\"\"Ours.\"\"\"


def main(words: list[str]) -> int:
    \"\"\"Print them.\"\"\"
    print(*words)
    return 0
""",
    "tests/test_own.py": "def test_own():\n    pass\n",
}
EXPERIMENTS = {
    f"configs/experiment/an_experiment_of_ours_{number}.yaml": f"""\
# @package _global_
# Ours.
defaults:
  - smoke
  - override /logger: csv

optim:
  own_number: {number}
  lr: 1e-3
"""
    for number in range(1, 4)
}
# file -> a line, and what replaces it
CHANGES = {
    "configs/callbacks/default.yaml": (
        "progress:\n",
        "rate:\n  _target_: lightning.pytorch.callbacks.LearningRateMonitor\nprogress:\n",
    ),
    "pyproject.toml": (
        "[project.scripts]\n",
        '[project.urls]\nHomepage = "https://example.org"\n\n[project.scripts]\n',
    ),
    "src/my_gpt/__init__.py": (
        "        commands={\n",
        '        commands={\n            "own": Command("my_gpt.own.command:main", "do", False),\n',
    ),
    "src/my_gpt/optim.py": (
        "    eps: float = 1e-8,\n) -> AdamW:",
        "    eps: float = 1e-8,\n    own_number: int = 1,\n) -> AdamW:",
    ),
}
# What many owners need no more; a name that ends with a slash is a folder.
DELETED = (
    "configs/experiment/",
    "configs/logger/",
    "configs/model/gpt2.yaml",
    "configs/model/gpt2_large.yaml",
    "configs/model/gpt2_medium.yaml",
    "configs/model/gpt2_xl.yaml",
    "configs/model/modern.yaml",
    "configs/model/modern_124m.yaml",
    "configs/model/modern_1b.yaml",
    "configs/model/modern_350m.yaml",
    "configs/model/modern_nano.yaml",
    "configs/optim/muon.yaml",
    "configs/sweep.yaml",
    "docs/",
    "scripts/kubernetes/",
    "scripts/sky/",
    "scripts/slurm/",
    "src/my_gpt/modern.py",
)


@pytest.fixture
def project(baked, tmp_path):
    """A default project that a test may change."""
    return shutil.copytree(baked(), tmp_path / "my-gpt")


@pytest.fixture
def tests(project, environment, python_of_forks, tmp_path):
    """Return a function that runs tests of the project; it returns the status and the output."""
    options = ["-q", "-n0", "--assert=plain", "-p", "no:cacheprovider"]
    settings = {
        "PYTHONPATH": f"{project}/src:{project}/engine/src",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(*words):
        done = subprocess.run(
            [python_of_forks, "-m", "pytest", *options, f"--basetemp={tmp_path / 'own'}", *words],
            cwd=project,
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        return done.returncode, done.stdout

    return run


def write(project, files):
    for name, text in files.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, "utf-8")


def change(path, old, new):
    text = path.read_text("utf-8")
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new), "utf-8")


@pytest.mark.slow
def test_additions_of_every_kind_break_no_test(project, tests):
    write(project, FILES | EXPERIMENTS)
    for name, (old, new) in CHANGES.items():
        change(project / name, old, new)
    status, output = tests()
    assert status == 0, output


@pytest.mark.slow
def test_what_an_owner_deletes_is_missed_by_no_test(project, tests):
    for name in DELETED:
        path = project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for old, new in (
        ("  - experiment: quickstart\n", ""),
        ("  - logger: wandb\n", "  - logger: none\n"),
        ("max_steps: ???", "max_steps: 20"),
        ("  global_size: null", "  global_size: 8"),
    ):
        change(project / "configs/train.yaml", old, new)
    status, output = tests()
    assert status == 0, output


@pytest.mark.slow
def test_an_own_model_takes_the_place_of_ours(project, tests):
    """The owner renames a model's file and class, and the choice that names it."""
    (project / "src/my_gpt/gpt.py").rename(project / "src/my_gpt/network.py")
    change(project / "src/my_gpt/network.py", "class GPT(", "class Network(")
    change(project / "configs/model/gpt.yaml", "my_gpt.gpt.GPT", "my_gpt.network.Network")
    status, output = tests()
    assert status == 0, output
