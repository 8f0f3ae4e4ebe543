"""How long a save stops training: our save, compared with the least time that one could take.

usage: python lab/benchmarks/checkpoint.py [--megabytes 600] [--rounds 5] [--json FILE]

Interleaved in one process; medians. `plain` is only torch.save, fsync, and SHA-256; `blocking` is
our save; `background` is the time for which our background save stops its caller.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.writing import CopyingCheckpointIO


def main() -> None:
    """Measure, and print one table."""
    options = _options()
    state = {"state_dict": _weights(options.megabytes)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = _measured(state, Path(folder), options.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{options.megabytes} MB, median of {options.rounds} rounds")
    for name, median in medians.items():
        print(f"  {name:<12}{median:8.3f} s  {median / medians['plain']:6.2f} x plain")
    print(f"  background / blocking {medians['background'] / medians['blocking']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"megabytes": options.megabytes, "seconds": seconds}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's own)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _weights(megabytes: int) -> dict[str, torch.Tensor]:
    """Return matrices of 4 MB that add up to `megabytes`, as a model and its moments would."""
    return {f"weight.{n}": torch.randn(1024, 1024) for n in range(megabytes * 2**20 // 2**22)}


def _measured(state: dict[str, Any], folder: Path, rounds: int) -> dict[str, list[float]]:
    blocking = AtomicCheckpointIO()
    background = CopyingCheckpointIO(background=True)
    background.save_checkpoint(state, folder / "background.ckpt")  # allocates its buffers
    background.wait()
    (folder / "background.ckpt").unlink()
    actions: dict[str, Callable[[Path], None]] = {
        "plain": lambda path: _plain(state, path),
        "blocking": lambda path: blocking.save_checkpoint(state, path),
        "background": lambda path: background.save_checkpoint(state, path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds):
        names = [*actions][turn % 3 :] + [*actions][: turn % 3]  # each comes first in its turn
        for name in names:
            os.sync()  # earlier writes must not slow down this one
            seconds[name].append(_timed(lambda name=name: actions[name](folder / "new.ckpt")))
            background.wait()
            for path in folder.iterdir():
                path.unlink()
    return seconds


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _plain(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
