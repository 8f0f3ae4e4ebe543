#!/usr/bin/env python3
"""Measure how training speed depends on the number of devices of this machine.

usage: python lab/scaling.py [--devices 1,2] [--kinds strong,weak] [--rounds 3] [--steps 12]
           [--hardware measured|NAME|FILE] [--json FILE] [--chart FILE] [overrides]

Runs the real command with each number of devices alternately, and compares within a round: the
machine may change its speed between rounds. Strong: one global batch is split. Weak: the batch
grows with the devices. `--hardware` adds the prediction of `plan` for comparison; `measured` first
measures this machine with `doctor`.
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

# A GPT with 45 million parameters: large enough that the all-reduce has work to do.
MEDIUM = [
    "experiment=smoke",
    "data=synthetic",
    "data.source.vocab_size=50257",
    "model.n_layer=6",
    "model.n_head=8",
    "model.n_embd=512",
    "model.block_size=127",
]
SAMPLES = 8  # per step, over all devices (strong) or on each device (weak)
BATCH = {
    "strong": [f"batch.global_size={SAMPLES}"],
    "weak": ["batch.global_size=null", f"batch.micro_size={SAMPLES}"],
}
WARMUP = 3  # steps of each run that do not count
PROGRAM = [sys.executable, "-m", "lockstep_gpt"]


def main() -> None:
    """Measure, print the tables, and write the JSON file and the chart."""
    options, overrides = _parser().parse_known_args()
    results = {kind: measured(kind, options, overrides) for kind in options.kinds}
    if options.hardware:
        with tempfile.TemporaryDirectory() as folder:
            hardware = options.hardware
            if hardware == "measured":
                hardware = profile(max(options.devices), Path(folder), overrides)
            for kind, rows in results.items():
                add_prediction(kind, rows, hardware, overrides)
    for kind, rows in results.items():
        print(table(kind, rows))
    if options.json:
        report = {"command": sys.argv, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.chart:
        draw(results, options.chart)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    numbers = {"type": lambda text: [*map(int, text.split(","))]}
    parser.add_argument("--devices", **numbers, default=[1, 2], help="the first is the baseline")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["strong"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help=f"per run, {WARMUP} not counted")
    parser.add_argument("--hardware", help="measured, or what plan --hardware takes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    return parser


def measured(kind: str, options: argparse.Namespace, overrides: list[str]) -> list[dict[str, Any]]:
    """Return a row for each number of devices; speeds are compared within a round."""
    words = [*MEDIUM, *BATCH[kind], *overrides]
    speeds: dict[int, list[float]] = {number: [] for number in options.devices}
    for turn in range(options.rounds):
        for number in options.devices:
            seconds, tokens = step(number, options.steps, words)
            speeds[number].append(tokens / seconds)
            print(f"round {turn + 1}, {kind}, {number} devices: {seconds * 1e3:.0f} ms per step")
    base = options.devices[0]
    rows = []
    for number, rates in speeds.items():
        ratios = [one / other for one, other in zip(rates, speeds[base], strict=True)]
        cuts = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
        row = {"devices": number, "tokens_per_second": statistics.median(rates), "speed": cuts[1]}
        rows.append({**row, "quartiles": [cuts[0], cuts[2]]})
    return rows


def step(devices: int, steps: int, words: list[str]) -> tuple[float, int]:
    """Run the command once; return the median seconds of a step, and its tokens."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        pace = [f"max_steps={steps}", f"val_every={steps}", "log_every=1", "val_tokens=1"]
        place = [f"trainer.devices={devices}", f"run_dir={run}", "checkpoint.every=null"]
        quiet = ["verbosity=quiet", "schedule.warmup=1", "logger=none"]
        command = [*PROGRAM, "train", *words, *pace, *place, *quiet]
        subprocess.run(command, check=True)
        with (run / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    times = [float(row["throughput/step_seconds"]) for row in rows]
    return statistics.median(times[WARMUP:]), int(rows[0]["trainer/tokens"])


def profile(devices: int, folder: Path, overrides: list[str]) -> str:
    """Measure this machine with `doctor`; return the file that it writes."""
    path = folder / "profile.json"
    words = [f"trainer.devices={devices}", *overrides]
    subprocess.run(
        [*PROGRAM, "doctor", "--save-profile", str(path), *words],
        check=False,  # it may report problems of the machine
        stdout=subprocess.DEVNULL,
    )
    return str(path)


def add_prediction(
    kind: str, rows: list[dict[str, Any]], hardware: str, overrides: list[str]
) -> None:
    """Add to each row the speed that `plan` predicts, relative to the first row's."""
    numbers = ",".join(str(row["devices"]) for row in rows)
    flags = ["--hardware", hardware, "--devices", numbers, "--scaling", kind, "--json"]
    words = [word for word in overrides if not word.startswith("trainer=")]
    done = subprocess.run(
        [*PROGRAM, "plan", *MEDIUM, *BATCH[kind], *words, *flags],
        check=True,
        capture_output=True,
        text=True,
    )
    planned = [row["tokens_per_second"] for row in json.loads(done.stdout)["rows"]]
    for row, speed in zip(rows, planned, strict=True):
        row["planned_speed"] = speed / planned[0]
        row["planned_tokens_per_second"] = speed


def table(kind: str, rows: list[dict[str, Any]]) -> str:
    """Format the rows of one kind of scaling as text."""
    planned = "planned_speed" in rows[0]
    head = f"{'devices':>7} {'tokens/s':>11} {'speed':>7} {'quartiles':>13}"
    lines = [f"\n{kind} scaling", head + (f" {'planned':>8} {'tokens/s':>11}" if planned else "")]
    for row in rows:
        low, high = row["quartiles"]
        line = f"{row['devices']:7} {row['tokens_per_second']:11,.0f} {row['speed']:7.2f}"
        line += f" {f'{low:.2f} .. {high:.2f}':>13}"
        if planned:
            line += f" {row['planned_speed']:8.2f} {row['planned_tokens_per_second']:11,.0f}"
        lines.append(line)
    return "\n".join(lines)


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the speeds over the number of devices, with the ideal for comparison."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.6 * len(results), 3.4), layout="constrained")
    places = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (kind, rows) in zip(places, results.items(), strict=True):
        numbers = [row["devices"] for row in rows]
        axes.plot(numbers, [n / numbers[0] for n in numbers], ":", color="grey", label="ideal")
        axes.plot(numbers, [row["speed"] for row in rows], "o-", color="#1b6ca8", label="measured")
        if "planned_speed" in rows[0]:
            planned = [row["planned_speed"] for row in rows]
            axes.plot(numbers, planned, "x--", color="#c8553d", label="planned")
        axes.set_title(f"{kind} scaling", fontsize=9)
        axes.set_xticks(numbers)
        axes.set_xlabel("devices", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.supylabel("tokens per second, first = 1", fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
