"""Run every rung on 1 and 2 ranks, and compare the losses of all steps with the first rung's.

python lab/ladder/compare.py [flags] [settings]

Exits with status 1 if a difference is larger than rounding explains.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import io
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiment import SETTINGS, load, main
from lockstep.errors import UserError
from matplotlib.figure import Figure

from lockstep_gpt import PROJECT

FOLDER = Path(__file__).parent
BARS = {"64-true": 1e-10, "32-true": 1e-5}  # largest difference of a loss that rounding explains
RUNNING: set[subprocess.Popen[str]] = set()  # these are ended together with this process
WARMUP = 5  # steps whose time does not count
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)


@dataclass(frozen=True)
class Run:
    """One finished run of a rung."""

    rung: str
    ranks: int
    metrics: Path
    megabytes: float  # peak of its largest process

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The rows of metrics.csv, one per step."""
        with self.metrics.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [float(row["train/loss"]) for row in self.rows]

    @property
    def milliseconds(self) -> float:
        """Median time per step."""
        times = [float(row["throughput/step_seconds"]) for row in self.rows[WARMUP:]]
        return 1e3 * statistics.median(times)

    def differences(self, other: Run) -> list[float]:
        """Return the absolute differences from the losses of `other`, step by step."""
        return [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]


def rungs(ranks: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each rung that runs on this number of ranks, and the beginning of its command."""
    script = {name: str(FOLDER / f"{name}.py") for name in ("single_device", "ddp_by_hand")}
    accelerate = str(FOLDER / "ddp_accelerate.py")
    if ranks == 1:
        yield "single_device", [script["single_device"]]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    yield "ddp_by_hand", [*launcher, f"--master_port={free_port()}", script["ddp_by_hand"]]
    if ranks > 1:
        plain = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
        place = [f"--num_processes={ranks}", f"--main_process_port={free_port()}", *plain]
        yield (
            "ddp_accelerate",
            ["-m", "accelerate.commands.launch", "--multi_gpu", *place, accelerate],
        )
    else:
        yield "ddp_accelerate", [accelerate]
    command = ["-m", "lockstep_gpt", "train", *SETTINGS]
    yield PROJECT.program, [*command, f"trainer.devices={ranks}"]


def free_port() -> int:
    """Return a port that is not in use; two launchers at once would both use the default port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def run(rung: str, ranks: int, command: list[str], words: Sequence[str], folder: Path) -> Run:
    """Run one rung to its end, and return what it wrote to `folder`."""
    folder.mkdir(parents=True)
    metrics = folder / "metrics.csv"
    out = [f"run_dir={folder}/run"] if rung == PROJECT.program else [f"--metrics={metrics}"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    with (folder / "screen").open("w+") as screen:
        process = subprocess.Popen(
            [sys.executable, *command, *out, *words],
            env={"OMP_NUM_THREADS": threads, **os.environ},
            stdout=screen,
            stderr=subprocess.STDOUT,
            text=True,
        )
        RUNNING.add(process)
        _, status, usage = os.wait4(process.pid, 0)
        RUNNING.remove(process)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            screen.seek(0)
            sys.exit(f"{rung} on {ranks} ranks ended with {process.returncode}:\n{screen.read()}")
    if rung == PROJECT.program:
        metrics = folder / "run" / "metrics.csv"
    return Run(rung, ranks, metrics, usage.ru_maxrss / 1024)


def code_lines(path: Path) -> int:
    """Count the lines of code, without comments, docstrings, and empty lines."""
    source = path.read_text(encoding="utf-8")
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in LAYOUT]
    return len({line for a, b in spans[:-1] for line in range(a, b + 1)} - strings)


def tell(precision: str, started: list[Future[Run]]) -> list[Run]:
    """Print a table, each row as soon as its run has ended; the first run is the reference."""
    print(f"precision={precision}")
    print(f"{'rung':20} ranks  lines  ms/step    MB  last loss  val loss  largest difference")
    runs: list[Run] = []
    for job in started:
        runs.append(job.result())
        print(_row(runs[-1], runs[0]), flush=True)
    print()
    return runs


@contextlib.contextmanager
def pool_of(size: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool for `size` jobs at once; after an error or SIGTERM, end the running ones."""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    pool = ThreadPoolExecutor(size)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):
            process.terminate()
        pool.shutdown()


def _row(run: Run, reference: Run) -> str:
    script = FOLDER / f"{run.rung}.py"
    lines = code_lines(script) if script.exists() else 0
    largest = f"{max(run.differences(reference)):.1e}" if run is not reference else "reference"
    cost = f"{lines:5}  {run.milliseconds:7.1f} {run.megabytes:5.0f}"
    losses = f"{run.losses[-1]:9.6f}  {float(run.rows[-1]['val/loss']):8.6f}"
    return f"{run.rung:20} {run.ranks:5}  {cost}  {losses}  {largest:>18}"


def remarks(runs: list[Run]) -> str:
    """Explain which differences are real, and which are not."""
    by_hand = [run for run in runs if run.rung == "ddp_by_hand"]
    means = [f"{float(run.rows[-1]['val/mean_of_means']):.6f}" for run in by_hand]
    numbers = " and ".join(str(run.ranks) for run in by_hand)
    return (
        f"lines: of the rung's own script; {PROJECT.program} is a command. "
        "MB: the largest process.\n"
        "Losses differ only by rounding: other batch shapes are added in another order.\n"
        "val loss is the mean over samples. The mean of the batches' means, which you get by\n"
        "averaging the values that batches or ranks report, is "
        f"{' and '.join(means)} on {numbers} ranks:\n"
        "the last batches are smaller, but count as much as the others."
    )


def draw(results: dict[str, list[Run]], path: Path) -> None:
    """Write a PNG with the loss of each step, and its distance from the first rung's loss.

    Later runs are drawn thinner, so that earlier ones stay visible below them.
    """
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for precision, runs in results.items():
        for number, run in enumerate(runs):
            thickness = 1 + 1.3 * (len(runs) - number)
            color = f"C{number}"
            steps = range(1, len(run.losses) + 1)
            if runs is results[next(iter(results))]:
                label = f"{run.rung}, {run.ranks} rank{'s' if run.ranks > 1 else ''}"
                left.plot(steps, run.losses, lw=thickness, color=color, label=label)
            gaps = [gap or float("nan") for gap in run.differences(runs[0])]
            right.semilogy(steps, gaps, "o", ms=thickness, mfc="none", color=color)
        right.axhline(BARS[precision], color="grey", ls="--", lw=1)
        right.text(1, BARS[precision] * 1.3, f"bar for {precision}", fontsize=8, color="grey")
    left.set(xlabel="step", ylabel="loss", title="every rung and number of ranks: one curve")
    right.set(xlabel="step", title="distance from single_device (no circle: equal to the bit)")
    left.legend(fontsize=8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UserError(f"--chart {path} cannot be written ({error.strerror})") from None


def compare() -> None:
    """Run the rungs, print the tables, draw the chart, and check the differences."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--ranks", default="1,2", help="numbers of ranks, including 1")
    flags.add_argument("--precisions", default=",".join(BARS))
    flags.add_argument(
        "--at-once", type=int, default=1, help="runs at a time; distorts their times"
    )
    flags.add_argument("--chart", type=Path, default=Path("runs/ladder.png"))
    options, words = flags.parse_known_args()
    precisions = _precisions(options.precisions)
    worlds = _worlds(options.ranks)
    load(words, 1)  # prepares the data before any run is timed, and rejects wrong settings
    with (
        tempfile.TemporaryDirectory() as folder,
        pool_of(options.at_once) as pool,
    ):
        jobs = {
            precision: [
                pool.submit(run, name, ranks, start, [*words, f"precision={precision}"], place)
                for ranks in worlds
                for name, start in rungs(ranks)
                for place in [Path(folder, precision, f"{name}{ranks}")]
            ]
            for precision in precisions
        }
        results = {precision: tell(precision, started) for precision, started in jobs.items()}
        print(remarks(results[precisions[0]]))
        draw(results, options.chart)
        print(f"chart: {options.chart}")
        sys.exit(judge(results))


def _precisions(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(BARS))
    if unknown:
        raise UserError(f"--precisions {unknown[0]} is not one of {', '.join(BARS)}")
    return names


def _worlds(text: str) -> list[int]:
    numbers = sorted({int(number) for number in text.split(",") if number.isdecimal()})
    if not text.replace(",", "").isdecimal() or numbers[0] != 1:
        raise UserError(f"--ranks {text} must be whole numbers, including 1: 1,2")
    return numbers


def judge(results: dict[str, list[Run]]) -> int:
    """Return 1 if a loss differs from the first rung's by more than the limit, and print which."""
    far = [
        f"{run.rung} on {run.ranks} ranks, {precision}: {largest:.1e} is above {BARS[precision]}"
        for precision, runs in results.items()
        for run in runs
        if (largest := max(run.differences(runs[0]))) > BARS[precision]
    ]
    print("\n".join(far) or "equal: " + ", ".join(f"{name} to {BARS[name]}" for name in results))
    return 1 if far else 0


if __name__ == "__main__":
    main(compare)
