"""Host memory and reads of ranks that resume, beyond what they hold afterward; Linux only.

usage: python lab/benchmarks/resume_memory.py [--ranks 8] [--width 512] [--layers 6]
           [--strategy ddp | fsdp2] [--save-parts] [--against CHECKOUT]

A run takes one step and saves; then all ranks resume it, with none of its pages in memory, and
pause before their next step. Memory is the PSS of all ranks, in which a page that several
processes share counts once. Columns:

- held: what a new run's ranks have at this point, and the optimizer state
- peak: while resuming
- extra: peak - held, in copies of the checkpoint
- read: bytes that ranks read with system calls (as for a SHA-256) beyond a new run, in copies
- disk: bytes that came from the disk beyond a new run, also by mapped files, in copies
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from process_tree import tree, words_of

ROOT = Path(__file__).parents[2]
LIMIT = 600.0  # seconds that one command may take
PAUSE = 4.0  # seconds that ranks wait before their first step, for samples of what they hold
MIB = 2**20
WORDS = (
    "train",
    "experiment=smoke",
    "logger=none",
    "trainer=cpu",
    "callbacks=[]",
    "verbosity=quiet",
    "batch.micro_size=1",
    "val_every=1000",
    "checkpoint.every=1",
)
# A callback that pauses each rank before its first step; any checkout can load it.
HOLD = """\
import time
from pathlib import Path

import lightning

class Hold(lightning.Callback):
    def on_train_start(self, trainer, module):
        Path(__file__).with_name(f"held-{{trainer.global_rank}}").touch()
        time.sleep({pause})
"""


@dataclass
class Figures:
    """What the ranks of one command took, in bytes."""

    peak: int  # PSS before all ranks had resumed
    held: int  # PSS afterward
    read: int  # by system calls
    disk: int


def main() -> None:
    """Measure, and print one line for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="model.n_embd (default: 512)")
    parser.add_argument("--layers", type=int, default=6, help="model.n_layer (default: 6)")
    parser.add_argument("--strategy", default="ddp", choices=("ddp", "fsdp2"))
    parser.add_argument("--save-parts", action="store_true", help="fsdp2: a file for each rank")
    parser.add_argument("--against", type=Path, help="another checkout, measured first")
    options = parser.parse_args()
    print("MiB, then copies of the checkpoint")
    titles = ("checkpoint", "held", "peak", "extra", "read", "disk")
    print(f"{'':8}", *(f"{title:>12}" for title in titles), sep="")
    if options.against:
        measure("there", options.against, options)
    measure("here", ROOT, options)


def measure(name: str, place: Path, options: argparse.Namespace) -> None:
    """Print the line of the checkout at `place`."""
    words = [
        f"model.n_embd={options.width}",
        f"model.n_layer={options.layers}",
        "model.n_head=8",
        f"batch.global_size={options.ranks}",
        f"trainer.devices={options.ranks}",
        f"strategy={options.strategy}",
        "+callbacks.hold._target_=hold.Hold",
    ]
    if options.save_parts:
        words.append("strategy.save_parts=true")
    with tempfile.TemporaryDirectory(prefix="resume-") as path:
        folder = Path(path)
        (folder / "hold.py").write_text(HOLD.format(pause=PAUSE))
        words = [*WORDS, *words, f"data.root={folder / 'data'}"]
        watch(place, folder, [*words, f"run_dir={folder / 'run'}", "max_steps=1"], options.ranks)
        new = [*words, f"run_dir={folder / 'new'}", "max_steps=1"]
        before = watch(place, folder, new, options.ranks)
        size = forget_pages(folder / "run/checkpoints")
        resume = ["train", f"run_dir={folder / 'run'}", "resume=auto", "max_steps=2"]
        after = watch(place, folder, [*resume, "trust_run_dir=true"], options.ranks)
    # AdamW: two thirds of a checkpoint, which a new run doesn't have yet.
    holders = options.ranks if options.strategy == "ddp" else 1
    held = before.held + holders * size * 2 // 3
    extra = after.peak - held
    copies = [extra, after.read - before.read, after.disk - before.disk]
    columns = [f"{number / MIB:12.0f}" for number in (size, held, after.peak)]
    columns += [f"{number / size:12.2f}" for number in copies]
    print(f"{name:8}", *columns, sep="", flush=True)


def watch(place: Path, folder: Path, words: list[str], ranks: int) -> Figures:
    """Run a command of the checkout at `place`, and sample its ranks until their next step."""
    for mark in folder.glob("held-*"):
        mark.unlink()
    source = os.pathsep.join([str(place / "src"), str(folder)])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep_gpt", *words]
    process = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        figures = sampled(process, folder, ranks)
        status = process.wait(LIMIT)
    finally:
        process.kill()
    if status != 0:
        raise SystemExit(f"{' '.join(words)} ended with status {status}")
    return figures


def sampled(process: subprocess.Popen[bytes], folder: Path, ranks: int) -> Figures:
    """Return the peak until all ranks pause, then what they hold and have read."""
    figures = Figures(0, 0, 0, 0)
    end = time.monotonic() + LIMIT
    while len([*folder.glob("held-*")]) < ranks:
        if time.monotonic() > end or process.poll() is not None:
            raise SystemExit("the ranks have not reached their next step")
        figures.peak = max(figures.peak, memory_of(ranks_of(process.pid)))
        time.sleep(0.02)
    pids = ranks_of(process.pid)
    figures.held = memory_of(pids)
    for pid in pids:
        counts = numbers_in(Path(f"/proc/{pid}/io"))
        figures.read += counts["rchar"]
        figures.disk += counts["read_bytes"]
    return figures


def ranks_of(pid: int) -> list[int]:
    """Return the ranks of a command, and the server that they are forks of."""
    return [child for child in tree(pid) if "rank_program" in words_of(child)]


def memory_of(pids: list[int]) -> int:
    """Return the PSS of processes, in bytes."""
    return 1024 * sum(numbers_in(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", 0) for pid in pids)


def numbers_in(file: Path) -> dict[str, int]:
    """Return the numbers in one of a process's files; none if it has ended."""
    numbers = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            first = value.split()[:1]
            if first and first[0].isdigit():
                numbers[name] = int(first[0])
    return numbers


def forget_pages(folder: Path) -> int:
    """Drop the pages of a folder's files from memory; return the files' bytes."""
    size = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size
    return size


if __name__ == "__main__":
    main()
