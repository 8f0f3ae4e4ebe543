"""No text mentions an absent extra; a page says how to add or delete each."""

import re
from pathlib import Path

import pytest

from hooks.answers import EXTRAS, NEEDS, checked
from hooks.project import README, TEMPLATE_ONLY, _kept

ROOT = Path(__file__).parents[2]
# Names that users type or read: strategies, settings, commands, libraries.
WORDS = {
    "sweep": "optuna|hydra/sweeper",
    "warm": r"launch\.warm|setproctitle",
    "copies": "copy_to|checkpoint.background|s3fs",
    "trackers": "logger=tensorboard|tensorboard --logdir|mlflow",
    "compat": r"lightning\.md",
    "completion": "install=bash",
    "sizes": r"model=auto|model\.size|size_law|scaling_law",
    "chat": r"data=chat|experiment=chat|from_weights|lora_rank|chat\.md"
    r"|lockstep-gpt (chat|serve)\b|serving\.md|load_test|openai[=>]|starlette|uvicorn",
    "cluster": "lockstep-gpt (plan|doctor|drill)",
    "datasets": r"mask_documents|packing=documents|documents\.md|data=mixture|data\.weights"
    r"|mixtures\.md|tokenizer_from",
    "ladder": "scripts/ladder|pitfalls.py",
    "container": r"docker build|devcontainer",
    "seeing": r"sync_panel|lockstep-gpt (panel|report)|report\.html|playwright",
    "tasks": r"lockstep-gpt score|default,tasks|tasks\.md|callbacks\.tasks|core_metric",
    "export": "init_from|lockstep-gpt export|safetensors|transformers",
    "slurm": r"sbatch|docs/slurm|slurm\.md",
    "kubernetes": r"kubectl|kubeflow|kubernetes\.md",
}
# Lines with such names that belong to other distributions, or to any machine.
OTHERS = {
    # Several extras need these.
    "constraints.txt": "^(playwright|safetensors|starlette|uvicorn)==",
    "pyproject.toml": '^    "(playwright|safetensors|starlette|uvicorn)(==|>=)',
    "docs/coming_from.md": r"^\| `init_from`",  # nanoGPT's setting
    "docs/lightning.md": "`(TensorBoard|MLFlow)Logger`",
}


def texts() -> dict[str, str]:
    """Return a project's files other than Python: pages, configurations, requirements."""
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")]
    names += [path.relative_to(ROOT).as_posix() for path in ROOT.glob("configs/**/*.yaml")]
    names += ["README.md", README, "pyproject.toml", "constraints.txt", ".gitignore"]
    return {name: (ROOT / name).read_text("utf-8") for name in names}


TEXTS = texts()


def holds(path: str, name: str) -> bool:
    """Return whether `path` is a file of that name or, if it ends with a slash, its folder."""
    return name.startswith(path) if path.endswith("/") else name == path


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_absent_extra_is_mentioned_nowhere(extra, defaults):
    gone = {extra, *(name for name, needs in NEEDS.items() if extra in needs)}
    taken = " ".join(name for name in EXTRAS if name not in gone)
    answers = checked({**defaults, "extras": taken})
    assert extra not in answers.extras
    files = [path for name in gone for path in EXTRAS[name]]
    spoken = [
        f"{name}: {line}"
        for name, text in TEXTS.items()
        if not any(holds(path, name) for path in files)
        for line in _kept(text, answers).splitlines()
        if re.search(WORDS[extra], line) and not re.search(OTHERS.get(name, "^$"), line)
    ]
    assert spoken == []


# Python files of every project that may still mention an extra, and why.
IN_PYTHON = {
    "src/lockstep_gpt/data/tokenizer_files.py": "transformers writes it",  # such a folder
    "src/lockstep_gpt/launch/choices.py": "data.packing",  # rejected by name
    "src/lockstep_gpt/launch/checks.py": "checkpoint.background=true conflict",  # with ours
    "tests/conftest.py": "^RANKS|warm.enabled=false",  # settings of runs with separate processes
    "tests/extras/conftest.py": "playwright",  # for the pages of several extras
    "tests/data/test_tokenizer_choice.py": "transformers",  # a reference, if it is installed
    "tests/data/sources/test_stdlib.py": "sys.modules",  # what must not be imported
    "tests/docs/test_commands.py": '^    "',  # which test runs a page's commands
    "tests/forked_python.py": '^    "',  # libraries that are imported if installed
    "tests/launch/test_compose.py": "warm.enabled",  # rejected by name
    "tests/test_config.py": "bpe is not one of bytes",  # also rejected
    "tests/test_train.py": "^OF_EXTRAS",  # files that may be next to ours
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_python_code_does_not_mention_absent_extras(extra):
    """Tests that need the extra skip with the reason `no such extra`, and may name it."""
    others = [path for paths in (TEMPLATE_ONLY, *EXTRAS.values()) for path in paths]
    spoken = []
    for folder in ("src", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
            if any(holds(other, name) for other in others) or "no such extra" in text:
                continue
            spoken += [
                f"{name}: {line}"
                for line in text.splitlines()
                if re.search(WORDS[extra], line) and not re.search(IN_PYTHON.get(name, "^$"), line)
            ]
    assert spoken == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_words_of_an_extra_are_those_that_its_own_lines_have(extra):
    own = [path for path in EXTRAS[extra] if (ROOT / path).is_file()]
    found = [path for folder in EXTRAS[extra] for path in (ROOT / folder).rglob("*.*")]
    everything = [*(ROOT / path for path in own), *found]
    read = "".join(path.read_text("utf-8", errors="replace") for path in everything)
    blocks = f"extra {extra}: begin.*?extra {extra}: end"
    read += "".join(part for text in TEXTS.values() for part in re.findall(blocks, text, re.DOTALL))
    for word in WORDS[extra].split("|"):
        if "(" not in word and ")" not in word:
            assert re.search(word, read), word


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_page_on_extras_names_all_files_of_one(extra):
    page = (ROOT / "docs/extras.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (\w+)\n.*?```text\n(.*?)```", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == list(EXTRAS)
    assert tuple(sections[extra].splitlines()) == EXTRAS[extra]
