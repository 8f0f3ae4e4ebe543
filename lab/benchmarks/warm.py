"""The cost of starting ranks, here and in another checkout: CPU seconds, memory, recovery.

usage: python lab/benchmarks/warm.py --against CHECKOUT [--repeats 7]

Each checkout runs with its own .venv. The two alternate; ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from process_tree import tree, wait_for, words_of

ROOT = Path(__file__).parents[2]
SMOKE = ["train", "experiment=smoke", "logger=none", "trainer=cpu", "callbacks=[]"]
RANKS = ["strategy=ddp", "batch.global_size=8", "batch.micro_size=1"]
# A callback that records when the first step after each start ended; any checkout can load it.
STEPS = """\
import time
import lightning

class FirstStep(lightning.Callback):
    written = False

    def on_train_batch_end(self, trainer, *_):
        if not self.written and trainer.is_global_zero:
            with open("{}", "a") as file:
                print(time.time(), file=file)
        self.written = True
"""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--repeats", type=int, default=7, help="of each figure (default: 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        return compare(Path(folder), options.against or ROOT, options.repeats)


def compare(folder: Path, other: Path, repeats: int) -> int:
    """Print one line per figure: here, there, ratio."""
    print(f"{'':44}{'here':>9}{'there':>9}{'ratio':>8}   medians of {repeats}")
    for name, figure, count in figures():
        pairs: list[tuple[float, float]] = []
        for number in range(count or repeats):
            places = (ROOT, other) if number % 2 else (other, ROOT)
            figure_of = {
                place: figure(place, Path(tempfile.mkdtemp(dir=folder))) for place in places
            }
            pairs.append((figure_of[ROOT], figure_of[other]))
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:44}{ours:9.2f}{theirs:9.2f}{ours / theirs:8.3f}", flush=True)
    return 0


def figures() -> Iterator[tuple[str, Callable[[Path, Path], float], int]]:
    """Yield name, what measures it in a checkout and a folder, and repeats (0: --repeats)."""
    for ranks in (1, 2, 8):
        words = [f"trainer.devices={ranks}", *(RANKS if ranks > 1 else [])]
        yield f"{ranks} ranks, 20 steps: CPU s", cpu_seconds(words), 0
    yield "a sweep of 4 jobs: CPU s", cpu_seconds(["--multirun", "seed=1,2,3,4"]), 0
    yield "from kill -9 of one of 2 ranks to a step: s", recovery, 0
    yield "8 ranks: MB (PSS of all processes)", memory, 3


def start(place: Path, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the command of the checkout at `place`."""
    command = [str(place / ".venv/bin/python"), "-m", "lockstep_gpt", *SMOKE, *words]
    run = [f"run_dir={folder / 'run'}", f"data.root={folder.parent / 'data'}"]
    quiet = subprocess.DEVNULL
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.Popen(
        [*command, *run], cwd=place, env=environment, stdout=quiet, stderr=quiet
    )


def cpu_seconds(words: list[str]) -> Callable[[Path, Path], float]:
    """Return a function that measures the CPU seconds of a command with all its processes."""

    def measure(place: Path, folder: Path) -> float:
        process = start(place, folder, *words)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, f"{words} ended with {process.returncode}"
        return usage.ru_utime + usage.ru_stime

    return measure


def recovery(place: Path, folder: Path) -> float:
    """Return the seconds from a kill to the end of the next step."""
    starts = folder / "starts"
    (folder / "first_step.py").write_text(STEPS.format(starts))
    words = [*RANKS, "trainer.devices=2", "max_steps=100000", "val_every=100000"]
    process = start(place, folder, *words, "+callbacks.first._target_=first_step.FirstStep")
    try:
        wait_for(lambda: any(folder.glob("run/checkpoints/step=*.ckpt")))
        ranks = [pid for pid in tree(process.pid) if "rank_program" in words_of(pid)]
        struck = time.time()
        os.kill(ranks[-1], signal.SIGKILL)
        wait_for(lambda: len(starts.read_text().split()) > 1)
        return float(starts.read_text().split()[1]) - struck
    finally:
        process.kill()
        process.wait()


def memory(place: Path, folder: Path) -> float:
    """Return the megabytes of all processes of 8 ranks; shared memory counts once."""
    words = [*RANKS, "trainer.devices=8", "max_steps=100000", "val_every=100000"]
    process = start(place, folder, *words)
    try:
        wait_for(lambda: any(folder.glob("run/checkpoints/step=*.ckpt")))
        return sum(map(shared_memory, tree(process.pid)))
    finally:
        process.kill()
        process.wait()


def shared_memory(pid: int) -> float:
    """Return a process's proportional set size in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


if __name__ == "__main__":
    raise SystemExit(main())
