"""How far rounding drives runs on several ranks apart: the table of engine/docs/strategies.md.

usage: python lab/benchmarks/drift.py [--ranks 2,4] [--steps 300] [--plot FILE.png]

The smoke experiment trains on one rank and on more, with the same samples in each step, in fp64,
fp32, and bf16. The table has the largest difference between any weight of both runs after some
steps, and between their training losses in any step. The plot has the losses in fp64, as in the
README.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

PRECISIONS = ("64-true", "32-true", "bf16-mixed")
EVERY = 10  # steps between saves


def main() -> None:
    """Print a row for each precision and number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="compared with one rank (default: 2,4)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: 300)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses in fp64")
    options = parser.parse_args()
    ranks = [int(word) for word in options.ranks.split(",")]
    columns = [f"{step} steps" for step in saved_steps(options.steps)]
    print("|", " | ".join(["precision", "ranks", *columns, "training loss"]), "|")
    print("|---" * (len(columns) + 3) + "|")
    with tempfile.TemporaryDirectory(prefix="drift-") as folder:
        for precision in PRECISIONS:
            runs = {
                count: train(Path(folder), precision, count, options.steps) for count in (1, *ranks)
            }
            losses = {count: losses_of(run) for count, run in runs.items()}
            for count in ranks:
                weights = [
                    largest_difference(runs[1], runs[count], step)
                    for step in saved_steps(options.steps)
                ]
                loss = max(differences(losses[1], losses[count]))
                figures = [f"{figure:.0e}" for figure in (*weights, loss)]
                row = [f"`{precision}`", str(count), *figures]
                print("|", " | ".join(row), "|", flush=True)
            if options.plot and precision == PRECISIONS[0]:
                draw(losses, options.plot)


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


def differences(one: list[float], other: list[float]) -> list[float]:
    """Return the distance between two runs' losses in each step."""
    return [abs(first - second) for first, second in zip(one, other, strict=True)]


def draw(losses: dict[int, list[float]], path: Path) -> None:
    """Draw each run's training loss, and its difference from that of one rank."""
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("training loss, nats per token", loc="left", fontsize=11)
    right.set_title("difference from 1 rank (64-true)", loc="left", fontsize=11)
    right.set_yscale("log")
    styles = (("#c6dbf7", 7.0), ("#5a91dc", 3.0), ("#12305a", 1.0))
    for (count, values), (color, width) in zip(losses.items(), styles, strict=False):
        name = f"{count} rank" + "s" * (count > 1)
        steps = range(1, len(values) + 1)
        left.plot(steps, values, color=color, linewidth=width, label=name)
        if count > 1:
            apart = differences(losses[1], values)
            right.plot(steps, apart, color=color, linewidth=1.2, label=name)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
