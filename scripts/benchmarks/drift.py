"""How far rounding drives runs on several ranks apart: the table of docs/devices.md.

usage: python scripts/benchmarks/drift.py [--ranks 2,4] [--steps 300]

The smoke experiment trains on one rank and on more, with the same samples in each step, in fp64 and
in fp32. The table has the largest difference between any weight of both runs after some steps, and
between their training losses in any step.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PRECISIONS = ("64-true", "32-true")
EVERY = 10  # steps between saves


def main() -> None:
    """Print a row for each precision and number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="compared with one rank (default: 2,4)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: 300)")
    options = parser.parse_args()
    columns = [f"{step} steps" for step in saved_steps(options.steps)]
    print("|", " | ".join(["precision", "ranks", *columns, "training loss"]), "|")
    print("|---" * (len(columns) + 3) + "|")
    with tempfile.TemporaryDirectory(prefix="drift-") as folder:
        for precision in PRECISIONS:
            one = train(Path(folder), precision, 1, options.steps)
            for ranks in map(int, options.ranks.split(",")):
                other = train(Path(folder), precision, ranks, options.steps)
                steps = saved_steps(options.steps)
                weights = [largest_difference(one, other, step) for step in steps]
                loss = max(
                    abs(first - second)
                    for first, second in zip(losses_of(one), losses_of(other), strict=True)
                )
                figures = [f"{figure:.0e}" for figure in (*weights, loss)]
                row = [f"`{precision}`", str(ranks), *figures]
                print("|", " | ".join(row), "|", flush=True)


def saved_steps(steps: int) -> list[int]:
    """Return the steps of the table: 10, 100, and the last one."""
    return sorted({EVERY, 10 * EVERY, steps} & {*range(EVERY, steps + 1, EVERY), steps})


def train(folder: Path, precision: str, ranks: int, steps: int) -> Path:
    """Train on some ranks, or raise a `CalledProcessError`; return the run directory."""
    run = folder / f"{precision}-{ranks}"
    place = ["trainer=cpu", f"trainer.devices={ranks}", "logger=none", f"data.root={folder}/data"]
    saving = [f"checkpoint.every={EVERY}", f"checkpoint.keep_last={steps}", f"val_every={steps}"]
    words = [*place, *saving, f"precision={precision}", f"max_steps={steps}", "log_every=1"]
    command = [sys.executable, "-m", "lockstep_gpt", "train", "experiment=smoke"]
    subprocess.run([*command, *words, f"run_dir={run}"], check=True, stdout=subprocess.DEVNULL)
    return run


def largest_difference(one: Path, other: Path, step: int) -> float:
    """Return the largest difference between two runs' weights after a step."""
    ours, theirs = (
        torch.load(run / f"checkpoints/step={step:06d}.ckpt", weights_only=True)["state_dict"]
        for run in (one, other)
    )
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def losses_of(run: Path) -> list[float]:
    """Return the training loss of each step."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


if __name__ == "__main__":
    main()
