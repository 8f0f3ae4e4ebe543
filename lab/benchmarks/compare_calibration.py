"""How often `compare` is wrong, and how many runs it needs: a table from real runs.

usage: python lab/benchmarks/compare_calibration.py [--seeds 64] [--folder runs/calibration]
                                                    [--script train.py --base WORDS --gain WORDS]

The smoke experiment, for 60 steps, trains with each seed in a setting and in one with a learning
rate that gains about 1 %; or a script of your own does, in two settings of it. The runs are then
drawn again and again, in random order:

- a setting against itself: runs of the base with other seeds, so no difference is real;
- pairs without a gain: the pairs' differences minus their mean, drawn with replacement;
- the gain of 1 %: the pairs as they are.

Each comparison looks after each pair, until it has an answer or a limit of pairs.

An unpaired test is Student's with a power of 90 % at the 5 % level, planned with the true gain and
the true deviations, which nobody knows beforehand.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from lockstep.evidence.pairs import PAIRS
from lockstep.evidence.runs import common_seeds, finished_groups, measure_of
from lockstep.evidence.verdicts import BETTER, OPEN, WORSE, Judge, interval_of

from lockstep_gpt import PROJECT

SMOKE = ["experiment=smoke", "max_steps=60", "val_every=60", "trainer=cpu", "trainer.devices=1"]
SCRIPTS = ["launch.inline=true"]  # all runs in one process
QUIET = ["logger=none", "callbacks.sample=null", "checkpoint.every=null"]
SIDES = {"base": "optim.lr=3e-3", "gain": "optim.lr=3.25e-3"}
COMPARISONS = 1000
LIMITS = (PAIRS, 100)  # of pairs: the default of `compare`, and many more
JUDGE = Judge(measure_of("val_loss"), error=0.05, variants=1)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=64, help="of each setting (default: 64)")
    parser.add_argument("--folder", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--script", type=Path, help="a program, instead of the smoke experiment")
    parser.add_argument("--base", default=SIDES["base"], help="settings of the base")
    parser.add_argument("--gain", default=SIDES["gain"], help="settings that gain about 1 %%")
    options = parser.parse_args()
    command = [*PROJECT.command("train"), *SMOKE, *QUIET]
    if options.script:
        command = [sys.executable, str(options.script), *SCRIPTS]
    for name in SIDES:
        words = shlex.split(getattr(options, name))
        train([*command, *words], options.folder / name, options.seeds)
    sides, groups = finished_groups([f"{options.folder}/{name}/*" for name in SIDES])
    seeds = common_seeds(sides, groups)
    base, gain = (np.array([JUDGE.measure.of(runs[seed]) for seed in seeds]) for runs in groups)
    print(table(base, gain))


def train(command: list[str], folder: Path, seeds: int) -> None:
    """Train a setting with seeds from 1, unless its folder is there."""
    if not folder.exists():
        words = [f"seed=range(1,{seeds + 1})", f"run_dir={folder}", "--multirun"]
        subprocess.run([*command, *words], check=True)


def table(base: np.ndarray, gain: np.ndarray) -> str:
    """Return the results for the losses of both settings, by seed."""
    random = np.random.default_rng(0)
    differences = gain - base
    centered = differences - differences.mean()
    lines = [
        f"{len(base)} seeds; loss {base.mean():.4f}, deviation of a run {base.std(ddof=1):.4f}, "
        f"of a pair's difference {differences.std(ddof=1):.4f}",
        f"planted gain: {-differences.mean():.4f}, {-differences.mean() / base.mean():.2%}",
    ]
    for limit in LIMITS:
        itself = [
            first_answer(random.choice(base, limit) - random.choice(base, limit))
            for _ in range(COMPARISONS)
        ]
        without_gain = [first_answer(random.choice(centered, limit)) for _ in range(COMPARISONS)]
        lines.append(
            f"up to {limit} looks: a setting with itself, wrong in {share_of(itself)}; pairs "
            f"without a gain, wrong in {share_of(without_gain)}"
        )
    with_gain = [first_answer(random.permutation(differences)[:PAIRS]) for _ in range(COMPARISONS)]
    runs = 2 * statistics.mean(pairs for _, pairs in with_gain)
    unpaired = 2 * pairs_of_unpaired_test(base, gain)
    lines.append(
        f"planted gain found in {share_of(with_gain, BETTER)}, with {runs:.1f} runs on average; "
        f"an unpaired test needs {unpaired:.0f}: ratio {runs / unpaired:.2f}"
    )
    return "\n".join(lines)


def first_answer(differences: np.ndarray) -> tuple[str, int]:
    """Return the first answer that is not open, and the pairs it took; or OPEN, and all."""
    for pairs in range(1, len(differences) + 1):
        answer = JUDGE.answer(interval_of(differences[:pairs], JUDGE.alpha))
        if answer != OPEN:
            return answer, pairs
    return OPEN, len(differences)


def share_of(answers: list[tuple[str, int]], *accepted: str) -> str:
    """Return the share of comparisons with one of some answers; by default, with any."""
    wanted = accepted or (BETTER, WORSE)
    return f"{sum(answer in wanted for answer, _ in answers) / len(answers):.1%}"


def pairs_of_unpaired_test(base: np.ndarray, gain: np.ndarray) -> float:
    """Return how many runs of each setting a test needs that was planned with the true values."""
    normal = statistics.NormalDist()
    quantiles = normal.inv_cdf(0.975) + normal.inv_cdf(0.9)
    variances = base.var(ddof=1) + gain.var(ddof=1)
    return float(quantiles**2 * variances / (gain - base).mean() ** 2)


if __name__ == "__main__":
    main()
