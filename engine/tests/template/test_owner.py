"""A project's owner adds, changes, and deletes files, and the tests of the project still pass."""

import re
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

ls
```

![a plot](plots/not_in_git.png)
""",
    "notebooks/plots.ipynb": "{}",
    "README.md": "# My own GPT\n\n```\nmake\nmy-gpt train experiment=a_year_of_training\n```\n",
    "src/my_gpt/tokens/words.txt": "some words\n",
    "src/my_gpt/own.py": '"""Ours."""\n\n\ndef main(words):\n    print(*words)\n    return 0\n',
    "src/my_gpt/training/sgd.py": '"""Ours."""\n\nfrom my_gpt import own as own\n',
    "tests/test_own.py": "def test_own():\n    pass\n",
}
EXPERIMENTS = {  # more than fit a line of the help
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
    for number in range(1, 7)
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
    "src/my_gpt/cli.py": (
        "    # Hydra's shell script",
        '    "own": Command(".own:main", "do it", False),\n    # Hydra\'s shell script',
    ),
}
ARGUMENTS = {
    "schedule.py": ('"constant", "wsd")', '"constant", "wsd", "step")'),
    "optim.py": (
        "    eps: float = 1e-8,\n) -> AdamW:",
        "    eps: float = 1e-8,\n    own_number: int = 1,\n) -> AdamW:",
    ),
}
# Inherited tests that read the project's files or list its choices, and others that name some.
READS = re.compile(r"\bROOT\b|\bCONFIGS\b")
OTHERS = [
    "tests/test_own.py",
    "tests/test_train.py::test_a_bad_setting_fails_in_one_line_and_creates_nothing",
]
# These run many commands, of pages that no addition changes.
SLOW = ("of_a_page", "launcher_is_joined", "errors_are_quoted", "train_generate_and_evaluate")
# Of files that mostly train, the tests whose result depends on what was added.
ONLY = (("test_wandb_run", "every_metric"),)
# In these, Python must not be a fork, which has a library already.
NO_FORKS = (
    "a_python_without_our_libraries",
    "check_imports_nothing",
    "checked_in_less_than_a_third",
    "libraries_that_not_everyone_has",
    "without_wandb",
    "names_every_group",  # Hydra would also find this repository's plugin, and its extras
)


@pytest.fixture
def project(baked, tmp_path):
    """A default project that a test may change."""
    return shutil.copytree(baked(extras="none"), tmp_path / "my-gpt")


@pytest.fixture
def python(project, environment, python_of_forks):
    """Return a function that runs Python in the project; it returns the status and the output."""
    settings = {"PYTHONPATH": str(project / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words):
        done = subprocess.run(
            [python_of_forks, *words],
            cwd=project,
            env=environment(**settings, OMP_NUM_THREADS="1", ENDS_WITH_PARENT="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture
def tests(python, tmp_path):
    """Return a function that runs tests of the project."""
    options = ["-m", "pytest", "-q", "-n0", "--assert=plain", "-p", "no:cacheprovider"]
    return lambda *words: python(*options, f"--basetemp={tmp_path / 'own'}", *words)


def write(project, files):
    for name, text in files.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, "utf-8")


def change(path, old, new):
    text = path.read_text("utf-8")
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new), "utf-8")


# What the page expects to be there, or installed.
MINE = '''\
"""A module and data of one's own."""

from lightning import LightningDataModule, LightningModule


class Module(LightningModule):
    """What is trained."""


class Data(LightningDataModule):
    """What it is trained on."""
'''


def follow(project):
    """Do what the page on extensions tells."""
    page = (project / "docs/extend.md").read_text("utf-8")
    files = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    write(project, {**dict(files), "mine.py": MINE})
    changes = re.findall(r"^In `(\S+)`.+?```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, difference in changes:
        lines = difference.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        change(project / name, old, new)
    assert (len(files), len(changes)) == (15, 2)


@pytest.mark.slow
def test_additions_of_every_kind_break_no_test(project, tests):
    follow(project)
    write(project, FILES | EXPERIMENTS)
    for name, (old, new) in CHANGES.items():
        change(project / name, old, new)
    for name, (old, new) in ARGUMENTS.items():
        change(project / "src/my_gpt" / name, old, new)
    inherited = sorted((project / "tests").rglob("test_*.py"))
    concerned = [str(test) for test in inherited if READS.search(test.read_text("utf-8"))]
    assert len(concerned) > 8
    chosen = [f"not {name}" for name in (*SLOW, *NO_FORKS)]
    chosen += [f"(not {file} or {name})" for file, name in ONLY]
    status, output = tests(*concerned, *OTHERS, "-k", " and ".join(chosen))
    assert status == 0, output
    status, output = tests("--collect-only")
    assert status == 0, output


@pytest.mark.slow
def test_without_docs_all_tests_are_collected_and_those_of_pages_are_skipped(project, tests):
    shutil.rmtree(project / "docs")
    status, output = tests("--collect-only")
    assert status == 0, output
    status, output = tests("tests/docs", "tests/test_packaging.py")
    assert status == 0, output
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+: (.+)$", output, re.MULTILINE)
    assert "no docs/extend.md here" in reasons, output


@pytest.mark.parametrize("page", ["extend", "tutorial"])
def test_any_page_can_be_deleted(page, project, tests):
    (project / f"docs/{page}.md").unlink()
    status, output = tests("tests/docs", "--collect-only")
    assert status == 0, output
