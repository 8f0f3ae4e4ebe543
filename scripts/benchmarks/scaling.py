#!/usr/bin/env python3
"""Measure how the speed of a training follows the number of ranks on this machine.

Runs the real command in turn with each number of ranks, at one global batch (strong scaling), and
compares the runs of each round: the machine may change its speed between rounds.

usage: python scripts/benchmarks/scaling.py
           [--ranks 1,2] [--rounds 3] [--steps 12] [--json FILE] [overrides]
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# A GPT of 45 million parameters: large enough that the all-reduce has something to carry.
MEDIUM = [
    "experiment=smoke",
    "data=synthetic",
    "data.vocab_size=50257",
    "model.n_layer=6",
    "model.n_head=8",
    "model.n_embd=512",
    "model.block_size=127",
    "batch.global_size=8",
]
WARMUP = 3  # steps of each run that are not counted


def main() -> None:
    """Measure, print the table and write the JSON."""
    options, overrides = _parser().parse_known_args()
    ranks = [int(number) for number in options.ranks.split(",")]
    seconds: dict[int, list[float]] = {number: [] for number in ranks}
    for turn in range(options.rounds):
        for number in ranks:
            seconds[number].append(step_seconds(number, options.steps, overrides))
            print(f"round {turn + 1}, {number} ranks: {seconds[number][-1] * 1e3:.0f} ms per step")
    rows = [row(number, seconds[ranks[0]], seconds[number]) for number in ranks]
    print(f"\n{'ranks':>5} {'ms/step':>9} {'speed':>7} {'quartiles':>13}")
    for each in rows:
        low, _, high = each["quartiles"]
        quartiles = f"{low:.2f} .. {high:.2f}"
        step = f"{each['ms']:9.0f}"
        print(f"{each['ranks']:5} {step} {each['speed']:7.2f} {quartiles:>13}")
    if options.json:
        options.json.write_text(json.dumps({"overrides": overrides, "rows": rows}, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks; the first is the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help=f"per run, {WARMUP} not counted")
    parser.add_argument("--json", type=Path)
    return parser


def step_seconds(ranks: int, steps: int, overrides: list[str]) -> float:
    """Return the median seconds per optimizer step of one run of the command."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"max_steps={steps}", f"val_every={steps}", "log_every=1", "data.val_tokens=1"]
        place = [f"trainer.devices={ranks}", f"run_dir={run}", "checkpoint.every=null"]
        quiet = ["verbosity=quiet", "optim.warmup_steps=1"]
        words = [*MEDIUM, *settings, *place, *quiet, *overrides]
        subprocess.run([sys.executable, "-m", "lockstep_gpt", "train", *words], check=True)
        with (run / "metrics.csv").open(encoding="utf-8") as file:
            times = [float(line["throughput/step_seconds"]) for line in csv.DictReader(file)]
    return statistics.median(times[WARMUP:])


def row(ranks: int, base: list[float], times: list[float]) -> dict[str, object]:
    """Return one line of the table; `speed` is the median over rounds of base time / time."""
    ratios = [before / after for before, after in zip(base, times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    median = statistics.median(ratios)
    return {
        "ranks": ranks,
        "ms": statistics.median(times) * 1e3,
        "speed": median,
        "quartiles": quartiles,
    }


if __name__ == "__main__":
    main()
