"""Pages of commands: tests run or compose each command in a block without a language."""

import re
import shlex
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT
from omegaconf import OmegaConf

import lockstep
from lockstep import commands as cli

ROOT = Path(__file__).parents[3]
# Page -> its sections whose commands another test runs.
OTHERS = {
    "README.md": (),
    "docs/after_the_run.md": (
        "Export it",
        "Start from existing weights",
    ),  # project/hub/test_docs.py
    "docs/devices.md": (),
    "docs/own_data.md": ("Your own format", "A LightningDataModule"),  # test_extend.py
    "docs/troubleshooting.md": (),
    "docs/tutorial.md": (),
    "engine/docs/commands.md": ("Report", "Panel"),  # pages/test_docs.py
    "engine/docs/run_and_checkpoints.md": (),
    "engine/docs/testing.md": (),
    "engine/docs/tokens.md": ("A tokenizer",),  # test_extend.py
}


def read(name, without):
    """Return a page without some sections; the program of the engine's pages is the project's."""
    text = (ROOT / name).read_text("utf-8").replace("my-gpt", PROJECT.program)
    for title in without:
        pattern = rf"^## {title}\n.*?(?=^## |\Z)"
        text, count = re.subn(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
        assert count == 1, f"{name}: {title}"
    return text


PAGES = {name: read(name, without) for name, without in OTHERS.items()}
# Run by other tests, or never: these need a server, a cluster, or the user's own paths.
ELSEWHERE = {
    "python3 scripts/dev.py": "scripts/test_dev.py runs it in a project of its own",
    "lockstep-gpt doctor": "cluster/test_doctor.py",
    "lockstep-gpt drill": "testing/test_drill.py",
    "lockstep-gpt check": "testing/test_command.py",
    "lockstep ": "test_lockstep_command.py, with a script of its own",
    "python3 -c": "the test of each page begins with it",
    "sbatch": "scripts/test_slurm.py, on a SLURM of its own",
    "srun": "scripts/test_slurm.py, on a SLURM of its own",
    "printf": "of the same page",
    "SWEEP=": "of the same page",
    "kubectl": "needs a cluster; scripts/test_kubernetes.py reads the manifests",
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


STEP = re.compile(r" (train|prepare) ")
OURS = [
    (page, line)
    for page, text in PAGES.items()
    for line in commands_of(text)
    if not line.startswith(tuple(ELSEWHERE))
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
RECEIPT_PAGES = ["docs/tutorial.md"]
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
