"""What equal bits cost: steps with batch.exact_micro_size against the same micro-batches without.

usage: python scripts/benchmarks/exact.py [--models S,M] [--repeats 7] [--steps 60]

The two take turns, each a whole run of the command; a ratio is that of their median steps within a
round, and the table has the median of rounds. `split` is what smaller micro-batches cost on one
rank by themselves: K micro-batches against one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loops import MODELS

LIMIT = 600  # seconds for one run
QUIET = ["logger=none", "callbacks=[]", "trainer=cpu", "strategy=ddp"]


def main() -> None:
    """Print a line per case: the medians of both, and of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="S,M", help="of scripts/benchmark.py (default: S,M)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    options = parser.parse_args()
    print(f"{'':34}{'with':>9}{'without':>9}{'ratio':>8}   ms, medians of {options.repeats}")
    with tempfile.TemporaryDirectory(prefix="exact-") as folder:
        for model in options.models.split(","):
            for name, *pair in cases(model):
                rounds = []
                for number in range(options.repeats):
                    order = (0, 1) if number % 2 else (1, 0)
                    found = {i: step_ms(Path(folder), model, pair[i], options.steps) for i in order}
                    rounds.append((found[0], found[1]))
                show(f"{model}, {name}", rounds)


def cases(model: str) -> list[tuple[str, list[str], list[str]]]:
    """Return name, the settings with equal bits, and those without, of the same work."""
    size = MODELS[model]["B"]
    found = []
    for ranks, leaves in ((2, 2), (2, 4), (4, 4), (1, 2), (1, 4)):
        micro = size // leaves
        same = [f"trainer.devices={ranks}"]
        exact = [*same, f"batch.exact_micro_size={micro}"]
        found.append((f"{ranks} ranks, K = {leaves}", exact, [*same, f"batch.micro_size={micro}"]))
        if ranks == 1:
            whole = [*same, f"batch.micro_size={size}"]
            found.append((f"split in {leaves}", [*same, f"batch.micro_size={micro}"], whole))
    return found


def step_ms(folder: Path, model: str, words: list[str], steps: int) -> float:
    """Train for so many steps; return the milliseconds of the median step of the last half."""
    shape = MODELS[model]
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    settings = [
        *(f"model.{name}={shape[name]}" for name in ("n_layer", "n_head", "n_embd")),
        f"model.block_size={shape['T']}",
        f"batch.global_size={shape['B']}",
        f"max_steps={steps}",
        f"log_every={steps // 2}",
        f"val_every={steps}",
        "checkpoint.every=null",
        "data=synthetic",
        f"data.vocab_size={shape['vocab']}",
        "data.val_tokens=1",
        f"data.root={folder / 'data'}",
        f"run_dir={run}",
    ]
    command = [sys.executable, "-m", "lockstep_gpt", "train", "experiment=smoke"]
    subprocess.run(
        [*command, *QUIET, *settings, *words],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # else one rank without would have more
    )
    return 1e3 * float(json.loads((run / "summary.json").read_text())["step_seconds_p50"])


def show(name: str, pairs: list[tuple[float, float]]) -> None:
    """Print one line."""
    here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(with_it / without for with_it, without in pairs)
    print(f"{name:34}{here:9.2f}{there:9.2f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
