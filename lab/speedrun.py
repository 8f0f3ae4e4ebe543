#!/usr/bin/env python3
"""Compare the training seconds that recipes need to reach one validation loss on a CPU.

usage: python lab/speedrun.py [RECIPE ...] [--seeds 1,2,3,4,5] [--nanogpt FOLDER]
           [--text FILE] [--target 1.396] [--json FILE]

A RECIPE is a file in lab/speedrun/ or your own file; lab/speedrun.md has the rules and the
records. By default, the newest recipe runs against nanoGPT's, seed by seed. `--nanogpt` is a
checkout of nanoGPT, for its recipe. `--text` uses another text, which does not count for records.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "lab/speedrun"
SIZE = 1_115_394  # bytes of the text; the last tenth is the validation set
SHA256 = "f8390c7a254261f9390706c82da8e6c78eae9c2e548f64cba3fa1b72a250bd85"  # CPython 3.11.7's
CONTEXT = 64  # tokens that a prediction may see
TARGET = 1.396  # nats per byte: our GPT-2's loss after 2,000 steps of nanoGPT's recipe
EVERY = 10  # steps between validations of our own runs


def main() -> None:
    """Run the recipes alternately; print a line for each run, and a table."""
    options = _options()
    if options.run:
        print(json.dumps(_run_file(options.run, options)))
        return
    names = [_recipe_file(name) for name in options.recipes or ("nanogpt.py", "ngrams.yaml")]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or standard_text(Path(folder) / "text")
        for seed in options.seeds:
            for path in names:
                run = _measured(path, seed, text, options, Path(folder))
                runs.append({"recipe": path.stem, "seed": seed, **run})
                print(line(runs[-1]), flush=True)
    print(table(runs, options.target))
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "runs": runs}, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, for its recipe")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--target", type=float, default=TARGET, help="nats per byte")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # one run, in its own process
    parser.set_defaults(seeds=[1, 2, 3, 4, 5])
    return parser.parse_args()


def _recipe_file(name: str) -> Path:
    path = Path(name) if Path(name).is_file() else RECIPES / name
    if not path.is_file():
        known = ", ".join(sorted(recipe.name for recipe in RECIPES.iterdir() if recipe.is_file()))
        sys.exit(f"{name} is neither a file nor one of {known}; give one of them or a path")
    return path


def standard_text(path: Path) -> Path:
    """Write the text that all records use to `path`: the start of the standard library's source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    content = bytearray()
    for file in files:
        if not {"site-packages", "dist-packages"} & set(file.parts):
            content += file.read_bytes()
        if len(content) >= SIZE:
            break
    digest = hashlib.sha256(content[:SIZE]).hexdigest()
    if digest != SHA256:
        sys.exit(
            f"the library of Python {sys.version.split()[0]} gives a text of SHA-256 "
            f"{digest[:12]}; records use {SHA256[:12]}, of CPython 3.11.7: use that, or set --text"
        )
    path.write_bytes(content[:SIZE])
    return path


def _measured(
    path: Path, seed: int, text: Path, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    if path.suffix != ".py":
        return _run_settings(path, seed, text, options.target, folder)
    settings = [f"--run={path}", f"--seeds={seed}", f"--text={text}", f"--target={options.target}"]
    peer = [f"--nanogpt={options.nanogpt}"] if options.nanogpt else []
    started = time.perf_counter()
    command = [sys.executable, __file__, *settings, *peer]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{path.name} failed; its own message is above")
    run = json.loads(done.stdout.splitlines()[-1])  # a recipe may print too
    return {**run, "startup": time.perf_counter() - started - run.pop("since_start")}


def _run_file(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train with a Python recipe until it reaches the target; validation is not timed."""
    content = np.frombuffer(options.text.read_bytes(), np.uint8)
    training, held_out = np.split(content, [int(0.9 * len(content))])
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stretches = module.prepare(training, options.seeds[0], options.nanogpt)
    begun = time.perf_counter()
    seconds = 0.0
    losses = []
    reached: dict[str, Any] = {}
    while not reached:
        started = time.perf_counter()
        step, predict = next(stretches, (None, None))
        seconds += time.perf_counter() - started
        if predict is None:
            break
        losses.append(held_out_loss(predict, held_out))
        if losses[-1] <= options.target:
            reached = {"steps": step, "seconds": seconds}
    since = time.perf_counter() - begun
    return {**reached, "all_seconds": seconds, "loss": losses[-1], "since_start": since}


@torch.no_grad()
def held_out_loss(predict: Any, held_out: np.ndarray[Any, Any]) -> float:
    """Return the mean cross-entropy in nats over windows of `CONTEXT` tokens, one after another.

    `predict` turns tokens, (B, T) of int64, into logits, (B, T, 256).
    """
    count = (len(held_out) - 1) // CONTEXT
    tokens = torch.from_numpy(held_out.astype(np.int64))
    inputs, targets = (tokens[i : i + count * CONTEXT].view(count, CONTEXT) for i in (0, 1))
    total = 0.0
    for part, goal in zip(inputs.split(64), targets.split(64), strict=True):
        logits = predict(part).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), goal.flatten(), reduction="sum"))
    return total / (count * CONTEXT)


def _run_settings(path: Path, seed: int, text: Path, target: float, folder: Path) -> dict[str, Any]:
    """Train settings to their last step with the real command; find when it hit the target."""
    recipe = yaml.safe_load(path.read_text("utf-8"))
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    words = [f"{name}={value}" for name, value in recipe["settings"].items()]
    held_out = (text.stat().st_size - int(0.9 * text.stat().st_size)) // CONTEXT * CONTEXT
    settings = [
        *("data=text", f"data.source.path={text}", f"data.root={folder}", f"val_tokens={held_out}"),
        *(f"val_every={EVERY}", f"log_every={EVERY}", "checkpoint.every=null", "logger=none"),
        *("verbosity=quiet", f"seed={seed}", f"run_dir={run}"),
    ]
    tree = _tree(recipe.get("commit"), folder)
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    started = time.perf_counter()
    command = [sys.executable, "-m", "lockstep_gpt", "train", *words, *settings]
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"{path.name} failed; its own message is above")
    total_seconds = time.perf_counter() - started
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = 0.0
    reached = {}
    losses = []
    for row in rows:
        seconds += float(row["throughput/step_seconds"] or 0) * EVERY
        if row["val/loss"]:
            losses.append(float(row["val/loss"]))
            if losses[-1] <= target and not reached:
                reached = {"steps": int(row["trainer/step"]), "seconds": seconds}
    rest = total_seconds - seconds  # start, validation and end
    return {**reached, "all_seconds": seconds, "loss": losses[-1], "startup": rest}


def _tree(commit: str | None, folder: Path) -> Path:
    """Return this project, or its state at `commit`, so that old records stay comparable."""
    if commit is None:
        return ROOT
    tree = folder / commit
    if not tree.exists():
        tree.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, "src", "configs"],
            check=True,
            stdout=subprocess.PIPE,
        )
        subprocess.run(["tar", "x", "-C", str(tree)], check=True, input=archive.stdout)
    return tree


def line(run: dict[str, Any]) -> str:
    """Describe one run in one line."""
    name = f"{run['recipe']} seed {run['seed']}"
    if "seconds" not in run:
        return f"{name}: not reached; loss {run['loss']:.4f} after {run['all_seconds']:.1f} s"
    return f"{name}: step {run['steps']}, {run['seconds']:.2f} s, loss {run['loss']:.4f} at the end"


def table(runs: list[dict[str, Any]], target: float) -> str:
    """Return means over seeds; ratios compare each run with the first recipe's of the same seed."""
    first = [run for run in runs if run["recipe"] == runs[0]["recipe"]]
    lines = [f"\nto {target} nats per byte", f"{'recipe':14}{'seeds':>6}{'steps':>8}{'seconds':>9}"]
    lines[1] += f"{'ratio':>8}{'last loss, standard error':>28}{'rest':>7}"
    for name in dict.fromkeys(run["recipe"] for run in runs):
        runs_of_recipe = [run for run in runs if run["recipe"] == name]
        there = [run for run in runs_of_recipe if "seconds" in run]
        losses = [run["loss"] for run in runs_of_recipe]
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if losses[1:] else math.nan
        pairs = [
            ours["seconds"] / base["all_seconds"]  # to the target, or the whole run if not reached
            for ours, base in zip(runs_of_recipe, first, strict=True)
            if "seconds" in ours
        ]
        figures = f"{'-':>8}{'-':>9}"
        if there:
            steps, seconds = (
                statistics.mean(run[key] for run in there) for key in ("steps", "seconds")
            )
            figures = f"{steps:8.0f}{seconds:9.2f}"
        ratio = f"{statistics.median(pairs):8.3f}" if pairs else f"{'-':>8}"
        rest = statistics.mean(run["startup"] for run in runs_of_recipe)
        last = f"{statistics.mean(losses):.4f} +- {error:.4f}"
        lines.append(
            f"{name:14}{len(there)}/{len(runs_of_recipe):<4}{figures}{ratio}{last:>28}{rest:7.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
