"""Pages of commands: tests run or compose each command in a block without a language."""

import re
import shlex
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT, extras
from omegaconf import OmegaConf

import lockstep
from lockstep import commands as cli
from lockstep.commands import table

ROOT = Path(__file__).parents[3]
# In a project: the page that a newcomer follows. The template's tests run all others; not your own
# pages: they may show any commands.
OF_TEMPLATE = (
    "README.md",
    "docs/devices.md",
    "docs/extras.md",
    "docs/jobs.md",
    "docs/own_data.md",
    "docs/resume.md",
    "docs/tracking.md",
    "docs/troubleshooting.md",
)
IS_TEMPLATE = (ROOT / "hooks").is_dir()
NAMES = ("docs/tutorial.md", *(OF_TEMPLATE if IS_TEMPLATE else ()))
FOLDER_OF_EXTRAS = Path(extras.__file__).parent


def pages_of_extras() -> list[str]:
    """Return the pages of extras, except those whose commands a test of the extra runs."""
    pages: list[str] = []
    for extra in sorted(path.parent.name for path in FOLDER_OF_EXTRAS.glob("*/__init__.py")):
        tests = [path.read_text("utf-8") for path in ROOT.glob(f"tests/extras/{extra}/*.py")]
        paths = [*ROOT.glob(f"docs/{extra}.md"), *ROOT.glob(f"docs/{extra}_*.md")]
        names = sorted(f"docs/{path.name}" for path in paths)
        pages += [name for name in names if not any(name in text for text in tests)]
    return pages


PAGES = {
    name: (ROOT / name).read_text("utf-8")
    for name in (*NAMES, *pages_of_extras())
    if (ROOT / name).is_file()
}
# Run by other tests, or never: these need a server, a cluster, or the user's own paths.
ELSEWHERE = {
    "python3 scripts/dev.py": "tests/scripts/test_dev.py runs it in a project of its own",
    "lockstep-gpt doctor": "tests/extras/cluster/test_doctor.py",
    "lockstep-gpt drill": "tests/extras/cluster/test_drill.py",
    "lockstep-gpt check": "tests/testing/test_command.py",
    "python3 -c": "the test of each page begins with it",
    "sbatch": "tests/scripts/test_slurm.py, on a SLURM of its own",
    "srun": "tests/scripts/test_slurm.py, on a SLURM of its own",
    "printf": "of the same page",
    "SWEEP=": "of the same page",
    "kubectl": "needs a cluster; tests/scripts/test_kubernetes.py reads the manifests",
    "uvx": "downloads; the template's tests run what it would",
    "pipx": "downloads; the template's tests run what it would",
    "wandb": "needs an account; test_wandb_run.py runs the command of the sweep's file",
}


def commands_of(text):
    """Return the lines of all blocks without a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines()]


def is_composed(line):
    """Tell whether a command needs GPUs, other machines, or files that are not here."""
    return bool(re.search(r"trainer=gpu|gpt2_124m|num_nodes=|=/\w|nproc_per_node=8", line))


def is_absent(line):
    """Tell whether this is a command of an extra that a project doesn't have."""
    program, name = line.split()[:2]
    return program == PROJECT.program and name not in table() and not IS_TEMPLATE


STEP = re.compile(r" (train|prepare) ")
OURS = [
    (page, line)
    for page, text in PAGES.items()
    for line in commands_of(text)
    if not line.startswith(tuple(ELSEWHERE)) and not is_absent(line)
]
COMPOSED = sorted({line for _, line in OURS if is_composed(line) and STEP.search(line)})
LAUNCHED = [line for _, line in OURS if line.startswith("torchrun ") and line not in COMPOSED]
# Commands that run here, as (page, command).
HERE = [
    (page, line.removeprefix("lockstep-gpt "))
    for page, line in OURS
    if line.startswith("lockstep-gpt ") and line not in COMPOSED
]
STARTS = ("lockstep-gpt ", "torchrun ")
RECEIPT_PAGES = [page for page in ("docs/tutorial.md", "docs/devices.md") if page in PAGES]
# The page whose test runs a command: its first one, but those with receipts come before others.
RUN_FOR: dict[str, str] = {}
for page, line in sorted(HERE, key=lambda each: each[0] not in RECEIPT_PAGES):
    RUN_FOR.setdefault(line, page)
RECEIPT = re.compile(r"^  (?:strategy|precision|batch|lr|schedule)  +.+$", re.MULTILINE)
RECEIPTS = {page: RECEIPT.findall(PAGES[page]) for page in RECEIPT_PAGES}


def rank_words(line):
    """Return the command's arguments and the number of ranks that its launcher starts."""
    words = shlex.split(line)
    number = re.search(r"--nproc_per_node=(\d+)", line)
    first = words.index(STEP.search(line)[1])
    # `prepare` composes what `train` does, and has no option to print it.
    return ["train", *words[first + 1 :]], int(number[1]) if number else None


@pytest.mark.parametrize("line", COMPOSED)
def test_command_for_other_machines_composes_and_its_batch_divides(
    line, capsys, tmp_path, tutorial_words
):
    words, launched = rank_words(line)
    words = tutorial_words(tmp_path, words)
    assert cli.main([*words, "--cfg", "job"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    devices = launched or config.trainer.devices
    places = (8 if devices == "auto" else devices, config.trainer.num_nodes)
    parallel = config.strategy.get("tensor_parallel", 1)
    batch = lockstep.build(config.batch).spread_over(*places, parallel)
    peak = lockstep.scaled_lr(config.optim.lr, batch, config.lr_scaling)
    schedule = lockstep.build(config.schedule, steps=config.max_steps, peak=peak)
    assert schedule.warmup_steps == (config.schedule.warmup or 0) < config.max_steps


@pytest.mark.slow
@pytest.mark.parametrize("line", LAUNCHED)
def test_launcher_is_joined(command, line, python_of_forks, tutorial_words):
    words = tutorial_words(command.folder, shlex.split(line)[1:])
    words += [f"data.root={command.data_root}"]
    words += ["callbacks.sample.length=9", "logger=none"]  # a long sample takes much of the time
    status, out, err = command.run_words([python_of_forks, "-m", "torch.distributed.run", *words])
    assert (status, len(re.findall(r"^step (\d+)/\1  val_loss", out, re.MULTILINE))) == (0, 1), err


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(RUN_FOR.values()))
def test_commands_of_a_page_run_in_order_and_print_the_receipts_shown(
    page, story, finished, two, commands_of_fixtures
):
    lines = [line for line in RUN_FOR if RUN_FOR[line] == page and line not in commands_of_fixtures]
    told = story(lines)
    for line, (status, screen) in zip(lines, told, strict=True):
        assert status == 0, f"{line}\n{screen}"
        if steps := re.search(r"resume=.* max_steps=(\d+)", line):
            assert f"step {steps[1]}/{steps[1]}  val_loss" in screen
    screens = "".join([finished[1], two[1], *(screen for _, screen in told)])
    assert [line for line in RECEIPTS.get(page, []) if line not in screens] == []
