"""The `drill exact` command: train one small experiment on several rank counts, compare all bits.

The last run goes from the most ranks to the fewest and is killed in between; it must end the same.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep_gpt import PROGRAM
from lockstep_gpt.config import Config
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.extras.cluster import flags
from lockstep_gpt.extras.cluster.small_runs import SmallRuns
from lockstep_gpt.launch import compose
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.settings import counted
from lockstep_gpt.training import schedule
from lockstep_gpt.training.batch_settings import BatchConfig

HELP = f"""usage: {PROGRAM} drill exact [flags] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Train a small experiment with batch.exact_micro_size on several numbers of ranks. Then train it
once more: start on the most ranks, and after each SIGKILL, resume on fewer, from a save between
two rows of metrics.csv if log_every (default: 3) leaves one. Each run prints a hash of its final
weights. Exit status 1 if weights, optimizer state, or metrics.csv differ.

  --ranks LIST   numbers of ranks (default: 1,2,4)
  --steps N      steps of each run (default: 150)

Settings go to {PROGRAM} train.
Example: {PROGRAM} drill exact model=modern_nano optim=muon precision=bf16-mixed"""
SETTINGS = [
    "batch.global_size=16",
    "batch.micro_size=null",
    "batch.exact_micro_size=2",
]
FLAG_OF_SETTING = {"trainer.devices": "--ranks", "max_steps": "--steps"}
TIMED = ("throughput/", "system/", "data/wait_share")  # columns of metrics.csv that may differ


class Remains(NamedTuple):
    """Results that must not depend on the number of ranks: two SHA-256 hashes, and metrics.csv."""

    weights: str
    optimizer: str
    rows: list[dict[str, str]]


def main(arguments: list[str]) -> int:
    """Train, print one line for each run, and return 1 if the results differ."""
    parser = flags.Parser("drill exact", HELP)
    parser.add_argument("--ranks", type=flags.counts, default=(1, 2, 4))
    parser.add_argument("--steps", type=flags.count, default=150)
    options, overrides = parser.split(arguments)
    if len(options.ranks) == 1:
        raise UserError(f"--ranks {options.ranks[0]} compares nothing; give several, as in 1,2")
    for word in overrides:
        flag = FLAG_OF_SETTING.get(word.partition("=")[0])
        if flag:
            raise UserError(f"{word} is set by the drill; use {flag}")
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        left = dict(_trained(Path(folder), options.ranks, options.steps, overrides))
    differing = differences(left)
    rows = counted(len(next(iter(left.values())).rows), "row")
    equal = f"equal bit for bit: weights, optimizer state, {rows} of metrics.csv (all but times)"
    print(*(differing or [equal]), sep="\n")
    print(f"with {_conditions()}; others may round differently, and give another hash")
    return int(bool(differing))


def _trained(
    folder: Path, ranks: tuple[int, ...], steps: int, overrides: list[str]
) -> Iterator[tuple[str, Remains]]:
    """Yield each run's name and results. Raise a `RunError` if a run fails."""
    size_settings = [
        f"max_steps={steps}",
        f"val_every={max(1, steps // 5)}",
        f"checkpoint.every={_prime(steps // 16)}",  # some steps before a kill are repeated
    ]
    runs = SmallRuns(folder, [*SETTINGS, *size_settings], overrides)
    config = flags.each_job(runs.words, compose.resolve_config)[0][1]
    leaves = _leaves(config.batch, ranks)
    size = counted(config.batch.micro_size or 1, "sample")
    threads = counted(config.batch.exact_threads, "thread")
    print(f"{counted(steps, 'step')} of {leaves} micro-batches of {size}, {threads} per rank")
    for legs in [*((count,) for count in ranks), ranks[::-1]]:
        run = "-".join(map(str, legs))
        name = f"{run.replace('-', ' -> ')} rank{'s' * (legs[0] > 1)}"
        print(f"  {name:<24}", end="", flush=True)
        started = time.monotonic()
        try:
            resumed = _train(runs, run, legs, config)
        except RunError:
            print("failed", flush=True)
            raise
        seconds = time.monotonic() - started
        left = left_by(runs.directory(run))
        after = ""
        if resumed:
            after = f"  resumed after {' and '.join(f'step {step}' for step in resumed)}"
        print(f"{left.weights[:12]}{seconds:6.0f} s{after}", flush=True)
        yield name, left


def _leaves(batch: BatchConfig, ranks: tuple[int, ...]) -> int:
    """Count the micro-batches; raise a `UserError` if a rank count would change the sum's order."""
    global_size = batch.global_size
    size = batch.exact_micro_size
    if not size or not global_size:
        raise UserError("batch.exact_micro_size=null is equal only up to rounding; set a size")
    for count in ranks:
        schedule.plan_batch(batch, 1, count, 1)
    return global_size // size


def _prime(at_least: int) -> int:
    """Return a prime: few values of log_every have a row at each multiple."""
    numbers = itertools.count(max(5, at_least))
    return next(
        number
        for number in numbers
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
    )


def _train(runs: SmallRuns, name: str, legs: tuple[int, ...], config: Config) -> list[int]:
    """Train on each rank count in `legs`; return the steps from which the run was resumed."""
    resumed: list[int] = []
    for part, ranks in enumerate(legs[:-1], 1):
        process = runs.start(name, f"trainer.devices={ranks}", resume=part > 1)
        _await_save(runs, name, config, part / len(legs), process)
        process.kill()  # does nothing if it has already ended
        _, errors = process.communicate()
        if process.returncode >= 0:
            raise RunError(_failure(ranks, process.returncode, errors))
        left = runs.gone(name)
        if left:
            raise RunError(f"{counted(left, 'process')} outlived the command that was killed")
        resumed.append(_saved_step(runs, name))
    status, errors = runs.train(name, f"trainer.devices={legs[-1]}", resume=bool(resumed))
    if status:
        raise RunError(_failure(legs[-1], status, errors))
    return resumed


def _await_save(
    runs: SmallRuns, name: str, config: Config, share: float, process: subprocess.Popen[str]
) -> None:
    """Wait for a save after a share of the steps, between two rows of the log if there is one."""
    steps = config.max_steps or 0
    every = config.checkpoint.every or steps
    saves = [step for step in range(every, steps, every) if step >= share * steps]
    between_rows = [step for step in saves if step % config.log_every]
    step = [*between_rows, *saves, steps][0]
    runs.wait_until(lambda: _saved_step(runs, name) >= step, process)


def _saved_step(runs: SmallRuns, name: str) -> int:
    from lockstep_gpt.run.checkpoint import checkpoints_in, step_of

    present = checkpoints_in(runs.directory(name).checkpoints)
    return step_of(present[-1]) if present else 0


def _failure(ranks: int, status: int, errors: str) -> str:
    if status == 0:
        return f"{counted(ranks, 'rank')}: done before it could be killed; raise --steps"
    return f"{counted(ranks, 'rank')}: exit {status}: {errors.strip()}"


def left_by(run: RunDirectory) -> Remains:
    """Return the results of a run that must not depend on the number of ranks."""
    from lockstep_gpt.run.checkpoint import checkpoints_in, read_checkpoint

    content = read_checkpoint(checkpoints_in(run.checkpoints)[-1])
    weights = content["weights"][content["global_step"]]  # the same hash as in the report
    return Remains(weights, _digest(content["optimizer_states"]), rows_of(run))


def rows_of(run: RunDirectory) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv without times; none if there is no such file."""
    if not run.metrics.is_file():
        return []
    with run.metrics.open(encoding="utf-8", newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.startswith(TIMED)}
            for row in csv.DictReader(file)
        ]


def differences(left: dict[str, Remains]) -> list[str]:
    """Return one line for each difference from the first run; [] if all are equal."""
    (whose, first), *others = left.items()
    lines = []
    for name, other in others:
        if other.weights != first.weights:
            lines.append(f"DIFFERENT  weights: {name}, {whose}")
        if other.optimizer != first.optimizer:
            lines.append(f"DIFFERENT  optimizer state: {name}, {whose}")
        nothing: dict[str, str] = {}
        pairs = itertools.zip_longest(other.rows, first.rows, fillvalue=nothing)
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        if wrong:
            ours, theirs = wrong[0]
            step = {**theirs, **ours}["trainer/step"]
            columns = theirs or ours
            column = next(key for key in columns if ours.get(key) != theirs.get(key))
            values = [row.get(column, "nothing") for row in wrong[0]]
            where = f"{counted(len(wrong), 'row')}, the first at step {step} with {column}"
            lines.append(
                f"DIFFERENT  metrics.csv: {where}: {values[0]} ({name}), {values[1]} ({whose})"
            )
    return lines


def _conditions() -> str:
    """Name the conditions that rounding depends on, in addition to our settings."""
    import torch

    gpu = f" and {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"torch {torch.__version__} on {torch.backends.cpu.get_cpu_capability()}{gpu}"


def _digest(content: Any) -> str:
    """Return the SHA-256 of all names, types, shapes, and values in nested containers."""
    sha = hashlib.sha256()
    for part in _parts(content, ""):
        sha.update(part)
    return sha.hexdigest()


def _parts(content: Any, name: str) -> Iterator[bytes]:
    import torch

    if isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            yield from _parts(value, f"{name}.{key}")
    elif isinstance(content, torch.Tensor):
        yield f"{name} {content.dtype} {tuple(content.shape)}\n".encode()
        yield content.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield f"{name} {content!r}\n".encode()
