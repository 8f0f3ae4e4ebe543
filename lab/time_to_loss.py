#!/usr/bin/env python3
"""Measure the steps, tokens, and seconds that a model and optimizer need to a validation loss.

usage: python lab/time_to_loss.py [--device cpu] [--target 1.396] [--seeds 1,2,3]
           [--recipes gpt2-adamw,modern-muon] [--steps N] [--every 10] [--json FILE] [overrides]

With `--device cuda`, the recipes have 124 M parameters, and the target is 3.28 nats per token, as
in the record runs of modded-nanogpt on FineWeb: choose such a text with `data=...`.

Every run is the real command. Overrides apply to all runs, for example `data=text
data.source.path=FILE`.
Seconds are training time, without validation and startup. The learning rate decays over all
`--steps` of a run: fewer steps reach a loss sooner, more steps reach a lower loss.
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
from typing import Any

SHARED = ["logger=none", "verbosity=quiet"]
# By device: overrides of `lockstep-gpt train`, and the recipe's number of steps.
RECIPES: dict[str, dict[str, tuple[list[str], int]]] = {
    "cpu": {
        "gpt2-adamw": (["experiment=gpt2_classic"], 2000),
        "modern-adamw": (["experiment=quickstart", "optim=adamw", "optim.lr=3e-3"], 1000),
        "modern-muon": (["experiment=quickstart"], 130),
    },
    "cuda": {
        "gpt2-adamw": (["experiment=gpt2_124m"], 4768),
        "modern-muon": (["experiment=modern_124m"], 4768),
    },
}
TARGETS = {"cpu": 1.396, "cuda": 3.28}  # nats per token
EVERY = {"cpu": 10, "cuda": 50}


def main() -> None:
    """Train; print a line for each run, and a table."""
    options, overrides = _options()
    results = []
    for name in options.recipes:
        for seed in options.seeds:
            result = reach(name, seed, options, overrides)
            results.append(result)
            print(line(result), flush=True)
    print(table(results, options.target))
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=list(RECIPES), default="cpu")
    parser.add_argument("--target", type=float, help="nats per token")
    parser.add_argument("--recipes", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[1])
    parser.add_argument("--steps", type=int, help="of every run; default: as the recipe says")
    parser.add_argument("--every", type=int, help="steps between validations")
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    device = options.device
    options.recipes = options.recipes or list(RECIPES[device])
    options.target = options.target or TARGETS[device]
    options.every = options.every or EVERY[device]
    return options, overrides


def reach(
    name: str, seed: int, options: argparse.Namespace, overrides: list[str]
) -> dict[str, Any]:
    """Train one recipe to its end; return when it reached the target, and its losses."""
    words, usual = RECIPES[options.device][name]
    steps = options.steps or usual
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        pace = [f"val_every={options.every}", f"log_every={options.every}", f"max_steps={steps}"]
        settings = [
            *SHARED,
            *words,
            *pace,
            f"seed={seed}",
            "checkpoint.every=null",
            "checkpoint.keep_best=0",
            f"run_dir={run}",
        ]
        subprocess.run(
            [sys.executable, "-m", "lockstep_gpt", "train", *settings, *overrides], check=True
        )
        with (run / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    result: dict[str, Any] = {"recipe": name, "seed": seed, "steps": steps}
    seconds = 0.0
    losses = []
    for row in rows:
        seconds += float(row["throughput/step_seconds"] or 0) * options.every
        if not row["val/loss"]:
            continue
        losses.append(float(row["val/loss"]))
        if losses[-1] <= options.target and "reached_step" not in result:
            place = {"step": int(row["trainer/step"]), "tokens": int(row["trainer/tokens"])}
            result.update({f"reached_{key}": value for key, value in place.items()})
            result["reached_seconds"] = seconds
    return {**result, "seconds": seconds, "best_loss": min(losses), "last_loss": losses[-1]}


def line(result: dict[str, Any]) -> str:
    """Describe one run in one line."""
    end = f"loss {result['last_loss']:.4f} after {result['steps']} steps, {result['seconds']:.0f} s"
    if "reached_step" not in result:
        return f"{result['recipe']} seed {result['seed']}: not reached; {end}"
    place = f"step {result['reached_step']}, {result['reached_seconds']:.1f} s"
    return f"{result['recipe']} seed {result['seed']}: reached at {place}; {end}"


def table(results: list[dict[str, Any]], target: float) -> str:
    """Format the means over seeds; all but the last loss are those of runs that hit the target."""
    lines = [f"\nto a validation loss of {target} nats per token, means over seeds"]
    names = f"{'seeds':>7} {'steps':>7} {'tokens':>10} {'seconds':>8} {'last loss':>9}"
    lines.append(f"{'recipe':14} {names}")
    for name in dict.fromkeys(result["recipe"] for result in results):
        runs = [result for result in results if result["recipe"] == name]
        there = [run for run in runs if "reached_step" in run]
        figures = f"{'-':>7} {'-':>10} {'-':>8}"
        if there:
            step, tokens, seconds = (
                statistics.mean(run[f"reached_{key}"] for run in there)
                for key in ("step", "tokens", "seconds")
            )
            figures = f"{step:7.0f} {tokens:10,.0f} {seconds:8.1f}"
        last = statistics.mean(run["last_loss"] for run in runs)
        lines.append(f"{name:14} {f'{len(there)}/{len(runs)}':>7} {figures} {last:9.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
