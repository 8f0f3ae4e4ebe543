#!/usr/bin/env python3
"""Compare our command's speed with that of loops that you would write without it.

usage: python lab/benchmark.py [--models S,M] [--precisions 32-true,bf16-mixed] [--ranks 1]
           [--loops plain,ours,...] [--rounds 5] [--steps 12] [--compile] [--device cpu]
           [--nanogpt PATH] [--json FILE] [--chart FILE]

Loops: `plain`, a GPT and a loop with torch's own settings; `ours`, the real command; `stock`, our
model in a Lightning Trainer with its default logging and bar; `accelerate`; `nanogpt`, a checkout
of it; `litgpt`, if it is installed. They run alternately, each in its own process with its own
environment; ratios are taken within a round. `pair` is one more process: our command and, in the
pauses between its steps, the best raw loop on our model, in alternating bursts. `toy` is a model so
small that a step is all overhead. Compilation and the first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from benchmarks.benchmark_task import MODELS, RECIPES, Task  # noqa: E402

LOOPS = ("plain", "ours", "stock", "accelerate", "pair")
REFERENCES = ("plain", "nanogpt")  # ratios are relative to these, if they run
LIMIT = 1800  # seconds per process


def main() -> None:
    """Measure, print the tables, and write the JSON file and the chart."""
    options = _options()
    results: list[dict[str, Any]] = []
    report = {"machine": machine(options.device), "command": sys.argv, "results": results}
    for name in options.models:
        for precision in options.precisions:
            for ranks in options.ranks:
                task = Task(name, precision, options.device, ranks, options.steps, options.compile)
                rows = measured(task, options)
                results.append({**task.__dict__, "loops": rows})
                print(table(task, rows), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.chart:
        draw(results, options.chart)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--models", **listed, default=["S", "M"], help=",".join(MODELS))
    parser.add_argument("--precisions", **listed, default=["32-true", "bf16-mixed"])
    parser.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=[1])
    parser.add_argument("--loops", **listed, default=LOOPS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="counted steps of a process")
    parser.add_argument("--compile", action="store_true", help="use torch.compile, if a loop can")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    options.loops = [*options.loops]
    if options.nanogpt:
        options.loops.append("nanogpt")
    return options


def machine(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that the figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("torch", "lightning", "accelerate", "litgpt"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions,
    }


def measured(task: Task, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run every loop once in each round; return the results of its processes."""
    rows: dict[str, list[dict[str, Any]]] = {loop: [] for loop in options.loops}
    for turn in range(options.rounds):
        for loop in options.loops:
            result = run(loop, task, options.nanogpt)
            if result is None:
                continue
            rows[loop].append(result)
            figure = f"{result['step_seconds'] * 1e3:.2f} ms per step"
            print(f"round {turn + 1} {task.model} {task.precision} {loop}: {figure}", flush=True)
    return {loop: results for loop, results in rows.items() if results}


def run(loop: str, task: Task, nanogpt: Path | None) -> dict[str, Any] | None:
    """Run one loop in its own process; if it cannot run, print the reason and return None."""
    if task.model in RECIPES and loop in ("stock", "accelerate"):
        print(f"{loop} has our GPT-2, not the quickstart's model: not run", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        if loop in ("ours", "pair"):
            words = ["-m", "lockstep_gpt", "train", *task.overrides(Path(folder), loop == "pair")]
        else:
            words = [str(FOLDER / "benchmarks" / "loops.py"), loop]
            if task.ranks > 1:
                words = ["-m", "torch.distributed.run", f"--nproc-per-node={task.ranks}", *words]
        paths = [str(FOLDER), str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "BENCHMARK_TASK": json.dumps({**task.__dict__, "out": str(out)}),
            "NANOGPT": str(nanogpt or ""),
        }
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if not out.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            print(f"{loop} does not run: {lines[-1] if lines else done.returncode}", flush=True)
            return None
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def table(task: Task, rows: dict[str, list[dict[str, Any]]]) -> str:
    """Format the figures for one model and precision as a table."""
    title = f"{task.model}, {task.precision}, {task.ranks} rank(s), {task.device}"
    references = [name for name in REFERENCES if name in rows]
    head = "".join(f"  {'/ ' + name:>20}" for name in references)
    lines = [f"\n{title}{', compiled' if task.compile else ''}"]
    lines.append(f"{'':12} {'ms/step':>9} {'tokens/s':>11} {'peak MB':>8} {'start s':>8}{head}")
    for loop, results in rows.items():
        step = statistics.median(result["step_seconds"] for result in results)
        memory = statistics.median(result["peak_mb"] for result in results)
        start = statistics.median(result["start_seconds"] for result in results)
        speed = task.tokens_per_step / step
        ratios = "".join(f"  {spread(results, rows[name]):>20}" for name in references)
        figures = f"{step * 1e3:9.2f} {speed:11,.0f} {memory:8,.0f} {start:8.1f}"
        lines.append(f"{loop:12} {figures}{ratios}")
    for result in rows.get("pair", []):
        best = result["ratio_to_best"]
        more = (result["step_seconds"] - result["best_seconds"]) * 1e3
        lines.append(f"  in one process: ours / best raw loop {best:.3f}, {more:+.3f} ms per step")
    return "\n".join(lines)


def spread(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> str:
    """Format the median and the quartiles of ratios that are each taken within a round."""
    pairs = zip(ours, theirs, strict=False)
    ratios = [a["step_seconds"] / b["step_seconds"] for a, b in pairs]
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens per second, with one group of bars for each model and precision."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 + 2.4 * len(results), 3.6), layout="constrained")
    for axes, result in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results, strict=True
    ):
        task = Task(**{name: result[name] for name in Task.__dataclass_fields__})
        loops = [loop for loop in result["loops"] if loop != "pair"]
        speeds = [
            task.tokens_per_step
            / statistics.median(row["step_seconds"] for row in result["loops"][loop])
            for loop in loops
        ]
        colours = ["#1b6ca8" if loop == "ours" else "#b0b7bd" for loop in loops]
        bars = axes.bar(loops, speeds, color=colours)
        axes.bar_label(bars, labels=[f"{speed:,.0f}" for speed in speeds], fontsize=7)
        axes.set_title(f"{task.model}, {task.precision}", fontsize=9)
        axes.tick_params(axis="x", rotation=45, labelsize=8)
        axes.tick_params(axis="y", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("tokens per second", fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
