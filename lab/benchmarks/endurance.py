"""Check that a run that is killed many times ends like an undisturbed run.

usage: python lab/benchmarks/endurance.py [--ranks 3] [--kills 10] [--seeds 5]

Each run loses processes at random moments, also while it writes checkpoints or deletes old ones:
ranks, their agent, or the command. The command is started again whenever it has ended. The corpus
grows after each kill, and a second run of each seed continues on a different number of devices.
Prints a line per run; exits with 1 if weights, optimizer state, or a row of metrics.csv (except
times) differ, or a finished checkpoint is lost. After a change of devices, sums round differently:
then the losses of all rows must be equal to 1e-5.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.checkpoints.reading import checkpoints_in, step_of
from lockstep.checkpoints.sums import fault_of
from lockstep.metrics.file import STEP
from lockstep.run.directory import RunDirectory
from lockstep.testing.results import differences, results_of
from process_tree import tree, wait_for, words_of

LIMIT = 600.0  # seconds per run
STEPS, KEEP = 400, 2
EXPERIMENT = [
    "experiment=smoke",
    "logger=none",
    "trainer=cpu",
    "data=text",
    "data.source.path=corpus",
    "batch.global_size=12",
    "batch.micro_size=2",
    f"max_steps={STEPS}",
    "val_every=40",
    "log_every=7",
    "checkpoint.every=4",
    f"checkpoint.keep_last={KEEP}",
    "launch.max_restarts=99",
    "resume=auto",
]
VICTIMS = {"rank": "rank_program", "agent": "agent_program", "command": "lockstep_gpt train"}
MOMENTS = ("any", "saving", "deleting")
LOSSES = ("train/loss", "val/loss")
TOLERANCE = 1e-5


def main() -> int:
    """Compare disturbed runs with an undisturbed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=3, help="of each run (default: 3)")
    parser.add_argument("--kills", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument("--seeds", type=int, default=5, help="so many runs (default: 5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder, contextlib.chdir(folder):
        Path("corpus").mkdir()
        for module in Path(asyncio.__file__).parent.glob("*.py"):
            shutil.copy(module, "corpus")
        undisturbed = Endured("whole", options.ranks)
        undisturbed.train([], random.Random(0))
        wrong = 0
        for seed in range(options.seeds):
            for change in (False, True):
                run = Endured(f"{seed}-{'change' if change else 'same'}", options.ranks)
                run.train([*range(options.kills)], random.Random(seed), change=change)
                good, line = run.compared(undisturbed, change=change)
                wrong += not good
                print(f"{'ok   ' if good else 'WRONG'} seed {seed}: {line}", flush=True)
    return 1 if wrong else 0


class Endured:
    """A run of the small experiment, with records of its kills and its checkpoints."""

    def __init__(self, name: str, ranks: int) -> None:
        self.run = RunDirectory(Path(name))
        self.ranks = ranks
        self.hurt: list[str] = []
        self.newest = 0  # step of the newest valid checkpoint that was seen
        self.lost = 0  # how often it was missing later

    def train(self, kills: list[int], chance: random.Random, change: bool = False) -> None:
        """Train to the end, and kill a process for each of `kills`."""
        half = len(kills) // 2
        process = self._start()
        for number in kills:
            name = chance.choice([*VICTIMS])
            moment = chance.choice(MOMENTS)
            if not self._await(process, moment, chance.uniform(0.2, 2.5)):
                break  # the run is done
            victims = [pid for pid in tree(process.pid) if VICTIMS[name] in words_of(pid)]
            if not victims:
                continue  # none is running at this moment
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
                self.hurt.append(f"{name}/{moment}")
            (Path("corpus") / f"{self.run.path.name}-{number}.py").write_text("x = 1\n" * 2000)
            turns = change and number >= half
            if turns:  # continue on other devices
                process.terminate()
                self.ranks = 1 if self.ranks == 2 else 2
                change = False
            if name != "rank" or turns:
                process.wait(LIMIT)
                wait_for(lambda: not self._left())
                self._look()
                process = self._start()
        status = process.wait(LIMIT)
        if status:
            log = Path(f"{self.run.path}.log").read_text()
            raise SystemExit(f"{self.run.path}: exit {status}\n{log[-3000:]}")
        self._look()
        for grown in Path("corpus").glob(f"{self.run.path.name}-*.py"):
            grown.unlink()  # other runs must start with the original corpus

    def _start(self) -> subprocess.Popen[bytes]:
        words = [*EXPERIMENT, f"trainer.devices={self.ranks}", f"run_dir={self.run.path}"]
        if self.run.config.exists():  # single settings, as a change of the devices must be
            words = [f"run_dir={self.run.path}", "resume=auto", f"trainer.devices={self.ranks}"]
        command = [sys.executable, "-m", "lockstep_gpt", "train", *words]
        with Path(f"{self.run.path}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _await(self, process: subprocess.Popen[bytes], moment: str, seconds: float) -> bool:
        """Wait for a moment; return whether the run is still running."""
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            self._look()
        folder = self.run.checkpoints
        end = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < end:
            saving = any(folder.glob(".step=*.tmp"))
            deleting = len(checkpoints_in(folder)) > KEEP + 1  # plus the best one
            if {"any": True, "saving": saving, "deleting": deleting}[moment]:
                break
        return process.poll() is None

    def _look(self) -> None:
        """Record the newest valid checkpoint, and whether the one recorded before is gone."""
        present = checkpoints_in(self.run.checkpoints)
        sound = next((step_of(path) for path in reversed(present) if not fault_of(path)), 0)
        self.lost += sound < self.newest
        self.newest = max(self.newest, sound)

    def _left(self) -> list[int]:
        """Return the processes that still work in this folder."""
        folder = Path.cwd()
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            pid = int(entry.name)
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cwd").readlink() == folder and pid != os.getpid():
                    pids.append(pid)
        return pids

    def compared(self, undisturbed: Endured, change: bool) -> tuple[bool, str]:
        """Compare the end, and all that was logged, with those of the undisturbed run."""
        whole, ours = results_of(undisturbed.run), results_of(self.run)
        differing = differences(whole, ours)
        off = largest_difference(whole.rows, ours.rows)
        line = f"{len(self.hurt)} kills, losses off by {off:.1e}"
        devices = f", {self.ranks} ranks at the end" if change else ""
        lost = f", LOST {self.lost} checkpoints" if self.lost else ""
        good = not self.lost and (off <= TOLERANCE if change else not differing)
        details = "" if change or not differing else f"\n  differ: {differing.text()}"
        return good, f"{line}{devices}{lost} ({' '.join(self.hurt)}){details}"


def largest_difference(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> float:
    """Return the largest difference between losses of two runs; infinite if steps differ."""
    if [row[STEP] for row in ours] != [row[STEP] for row in theirs]:
        return math.inf
    values = [
        (our_row[name], their_row[name])
        for our_row, their_row in zip(ours, theirs, strict=True)
        for name in LOSSES
    ]
    if any(bool(our_value) != bool(their_value) for our_value, their_value in values):
        return math.inf
    return max(abs(float(pair[0]) - float(pair[1])) for pair in values if pair[0])


if __name__ == "__main__":
    raise SystemExit(main())
