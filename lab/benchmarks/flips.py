"""Check that `verify` finds and names flipped bits, and never accuses a clean run.

usage: python lab/benchmarks/flips.py [--flips 100] [--seed 1] [--clean 20]

Flips one random bit in each of many small runs: in a weight, the optimizer's state, one rank's
gradient, a token, or a checkpoint, whose SHA-256 is then computed again. All runs have the settings
of one clean run, so one replay serves them all; the code that judges is that of `verify`. Then runs
of other kinds, some of them killed and resumed, are verified by the command itself. Prints a table;
exits with 1 if a flip that changed anything is not found and named, or a clean run is accused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lockstep import commands as cli
from lockstep.checkpoints.reading import (
    checkpoints_in,
    read_checkpoint,
    write_checkpoint,
)
from lockstep.evidence.callbacks import flip
from lockstep.evidence.differences import Comparison, Recorded, compare
from lockstep.evidence.replay import NAMES, replay
from lockstep.evidence.verify import recorded_of, steps_of
from lockstep.run.directory import RunDirectory

import lockstep_gpt  # noqa: F401  whose program it runs

STEPS = 20
KINDS = ("weight", "optimizer", "gradient", "token", "checkpoint")
TRAIN = [sys.executable, "-m", "lockstep_gpt", "train"]
SMALL = ["experiment=smoke", "trainer=cpu", "logger=none", "callbacks.sample.length=1"]
EXACT = ["batch.exact_micro_size=2", "checkpoint.keep_last=9"]
TRACE = "+callbacks.trace"  # after what flips a bit, so that it sees the bit
TRACED = [f"{TRACE}._target_=lockstep.callbacks.trace.Trace", f"{TRACE}.every=10"]
MODELS = ("model=nano", "model=modern_nano")
OPTIMIZERS = ("optim=adamw", "optim=muon")
PRECISIONS = ("precision=32-true", "precision=bf16-mixed")
RANKS = (1, 2, 3, 4)


def main() -> int:
    """Flip bits, verify clean runs, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        missed = flip_bits(Path(folder), options.flips, options.seed)
        accused = verify_clean(Path(folder), options.clean)
    print(f"{missed} flips missed, {accused} clean runs accused")
    return int(missed + accused > 0)


def flip_bits(folder: Path, count: int, seed: int) -> int:
    """Flip bits in `count` runs; return how many were not found or not named."""
    choice = random.Random(seed)
    clean = train_here(folder / "clean", [])
    again = recorded_of(replay(steps_of(recorded_of(clean), 0, None, 1), folder / "replay"))
    names = (again.directory.path / NAMES).read_text(encoding="utf-8")
    assert not judged(clean, again).differences
    outcomes: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        run, expected = flipped(folder / f"flip{number}", kind, clean, choice, names)
        comparison = judged(run, again)
        text = "none"
        outcome = "without effect"
        if comparison.differences:
            text = comparison.first().text
            is_named = all(word in text for word in expected)
            outcome = "found and named" if is_named else "found, NOT NAMED"
        elif not is_equal_state(run, clean):
            outcome = "MISSED"
        outcomes[kind].append(outcome)
        print(f"{number:4} {kind:<11}{outcome:<17}{expected}: {text}", flush=True)
    for kind, results in outcomes.items():
        counts = {outcome: results.count(outcome) for outcome in sorted({*results})}
        print(f"{kind:<11}{counts}", flush=True)
    return sum(
        "NOT" in outcome or outcome == "MISSED" for kind in outcomes for outcome in outcomes[kind]
    )


def flipped(
    path: Path, kind: str, clean: RunDirectory, choice: random.Random, names: str
) -> tuple[RunDirectory, list[str]]:
    """Return a run in which one bit was flipped, and words that name its place."""
    if kind == "checkpoint":
        return copy_with_flip(path, clean, choice)
    note = path.with_suffix(".note")
    step = choice.randrange(1, STEPS)
    rank = choice.randrange(2) if kind == "gradient" else 0
    target = "lockstep.evidence.callbacks.FlippedBit"
    words = [f"_target_={target}", f"note={note}", f"kind={kind}", f"step={step}"]
    words += [f"rank={rank}", f"seed={choice.randrange(10**6)}"]
    overrides = [f"+callbacks.flip.{word}" for word in words]
    run = train_here(path, overrides) if kind != "gradient" else train_on_two(path, overrides)
    expected = [note.read_text(encoding="utf-8")]
    if kind == "gradient":
        expected.append(f"(rank {rank})")
    if kind in ("gradient", "token"):
        expected.append(f"step {step + 1}:")
    assert expected[0] in names or kind == "token"
    return run, expected


def copy_with_flip(
    path: Path, clean: RunDirectory, choice: random.Random
) -> tuple[RunDirectory, list[str]]:
    """Copy a run, and flip a bit of a tensor in its last checkpoint."""
    subprocess.run(["cp", "-r", clean.path, path], check=True)
    run = RunDirectory(path)
    newest = checkpoints_in(run.checkpoints)[-1]
    content = torch.load(newest, weights_only=True)
    if choice.random() < 0.5:
        name, tensor = choice.choice([*content["state_dict"].items()])
        expected = name.removeprefix("model.")
    else:
        state = choice.choice([*content["optimizer_states"][0]["state"].values()])
        expected = choice.choice([name for name in state if name != "step"])
        tensor = state[expected]
    flip(tensor, choice)
    write_checkpoint(content, newest)
    return run, [expected, "number", "bit"]


def train_here(path: Path, overrides: list[str]) -> RunDirectory:
    """Train on one rank, in this process."""
    words = [*SMALL, *EXACT, "trainer.devices=1", "launch.inline=true", f"run_dir={path}"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = cli.main(["train", *words, *overrides, *TRACED])
    assert status == 0, printed.getvalue()
    return RunDirectory(path)


def train_on_two(path: Path, overrides: list[str]) -> RunDirectory:
    """Train on two ranks."""
    words = [*SMALL, *EXACT, "trainer.devices=2", "strategy=ddp", f"run_dir={path}"]
    subprocess.run([*TRAIN, *words, *overrides, *TRACED], check=True, capture_output=True)
    return RunDirectory(path)


def judged(run: RunDirectory, again: Recorded) -> Comparison:
    """Compare a run with the replay, as `verify` does."""
    names = json.loads((again.directory.path / NAMES).read_text(encoding="utf-8"))
    return compare(recorded_of(run), again, range(1, STEPS + 1), [10, STEPS], names)


def is_equal_state(run: RunDirectory, clean: RunDirectory) -> bool:
    """Return whether the last state of two runs has the same bits."""
    contents = [read_checkpoint(checkpoints_in(side.checkpoints)[-1]) for side in (run, clean)]
    texts = [io.BytesIO() for _ in contents]
    for content, text in zip(contents, texts, strict=True):
        torch.save([content["state_dict"], content["optimizer_states"]], text)
    return texts[0].getvalue() == texts[1].getvalue()


def verify_clean(folder: Path, count: int) -> int:
    """Verify `count` runs of different kinds; return how many were accused."""
    kinds = itertools.cycle(itertools.product(PRECISIONS, MODELS, OPTIMIZERS))
    accused = 0
    for number in range(count):
        ranks = RANKS[number % len(RANKS)]
        words = [*next(kinds), f"trainer.devices={ranks}", "batch.global_size=12"]
        words += ["batch.reference_size=12", "model.dropout=0.1", "model.block_size=32"]
        words += ["strategy=ddp"] if ranks > 1 else []
        words += ["callbacks=[default,trace]"] if number % 2 else []
        path = folder / f"run{number}"
        is_killed = number % 5 == 4
        train(path, words, is_killed)
        command = [sys.executable, "-m", "lockstep_gpt", "verify", str(path)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        line = (outcome.stdout.splitlines() or [outcome.stderr])[-1]
        accused += outcome.returncode != 0
        print(f"clean {number:3} {'killed ' * is_killed}{' '.join(words)}: {line}", flush=True)
    return accused


def train(path: Path, words: list[str], is_killed: bool) -> None:
    """Train a run; kill and resume it if `is_killed`."""
    steps = 300 if is_killed else STEPS
    command = [*TRAIN, *SMALL, *words, f"max_steps={steps}", f"run_dir={path}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if is_killed:
        process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        while not checkpoints_in(path / "checkpoints") and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()
        time.sleep(3)  # until its ranks have ended
        command = [*TRAIN, f"run_dir={path}", "resume=auto"]
    subprocess.run(command, check=True, **quiet)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
