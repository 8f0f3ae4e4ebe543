"""The time from `kill -9` of a rank to the run's next new step, part by part.

usage: python lab/benchmarks/restart.py [--kills 12] [SETTING=VALUE ...]

Kills random ranks of one run of two at random moments: the model of quickstart, which tracks to
wandb offline. A new step is one that no rank had computed before the kill. Each process notes the
clock when it enters or leaves a few functions (`clock/sitecustomize.py`); that is all it costs.
Prints a table of medians, in seconds, and the median and largest total.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from notes import CLOCK, Note, read_notes
from process_tree import tree, wait_for, words_of

RANKS = 2
TRAIN = [
    "-m",
    "lockstep_gpt",
    "train",
    "experiment=quickstart",
    "trainer=cpu",
    f"trainer.devices={RANKS}",
    "strategy=ddp",
    "max_steps=100000",
    "callbacks=[]",
    "launch.max_restarts=999",
    "+callbacks.steps._target_=noted_steps.Steps",
]
# What each part ends with: a function, entered (>) or left (<), or the end of a step.
PARTS = {
    "the agent has noticed": ">_end_others",
    "the other ranks have ended": "<_end_others",
    "agents have met": ">_start_workers",
    "a process has started": ">run_rank",
    "imports": ">call",
    "configuration; ranks have joined": "<join",
    "data": "<Tokens",
    "model": "<GPTModule",
    "loggers": "<loggers",
    "Trainer": ">announce",
    "receipt": "<announce",
    "which state to resume": "<checkpoint",
    "Lightning's setup": ">load_checkpoint",
    "the state is read": "<load_checkpoint",
    "the state is loaded": ">on_train_start",
    "the first batch": ">training_step",
    "the first step": "step",
    "steps computed again": "new step",
}


class Recovery(NamedTuple):
    """What the processes noted after the death of a rank."""

    struck_at: float  # seconds since 1970
    before: int  # the newest step of all attempts before
    notes: list[Note]  # until the next death; steps only of the new ranks

    def is_complete(self) -> bool:
        """Return whether there is a new step."""
        return any(note.step > self.before for note in self.notes)

    def repeated(self) -> int:
        """Return how many steps were computed again."""
        return self.before - min(note.step for note in self.notes if note.step) + 1

    def seconds(self) -> dict[str, float]:
        """Return part -> seconds; the last rank that gets there counts."""
        ends: dict[str, float] = {}
        for note in self.notes:
            if note.step == 0:
                ends[note.event] = max(note.at, ends.get(note.event, 0))
        steps = [note for note in self.notes if note.step]
        ends["step"] = steps[0].at
        ends["new step"] = next(note.at for note in steps if note.step > self.before)
        parts = {}
        at = self.struck_at
        for part, event in PARTS.items():
            end = max(at, ends.get(event, at))  # without a state to read, there is no such call
            parts[part] = end - at
            at = end
        return parts


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=12, help="of each launch (default: 12)")
    parser.add_argument("--seed", type=int, default=1, help="of the random kills")
    options, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        recoveries = NotedRun(Path(folder), settings).hurt(
            options.kills, random.Random(options.seed)
        )
    rows = [recovery.seconds() for recovery in recoveries]
    for part in PARTS:
        print(f"{part:36}{statistics.median(row[part] for row in rows):9.3f}")
    sums = [sum(row.values()) for row in rows]
    print(f"{'median of the sum':36}{statistics.median(sums):9.3f}")
    print(f"{'largest of the sum':36}{max(sums):9.3f}")
    repeated = statistics.median(recovery.repeated() for recovery in recoveries)
    print(f"{'median number of steps again':36}{repeated:9g}")
    return 0


class NotedRun:
    """A run below `folder` whose processes note the clock."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self._folder = folder
        self._settings = settings
        self._file = folder / "notes"

    def hurt(self, count: int, chance: random.Random) -> list[Recovery]:
        """Train; kill random ranks at random moments after new steps."""
        process = self._start()
        struck = [0.0]

        def has_recovered() -> bool:
            return process.poll() is not None or self._recovery(struck[-1]).is_complete()

        try:
            for _ in range(count):
                wait_for(has_recovered)
                time.sleep(chance.uniform(1, 3))
                assert process.poll() is None, (self._folder / "output").read_text()[-2000:]
                ranks = [pid for pid in tree(process.pid) if "rank_program" in words_of(pid)]
                struck.append(time.time())
                os.kill(chance.choice(ranks), signal.SIGKILL)
            wait_for(has_recovered)
        finally:
            process.kill()
            process.wait()
        ends = [*struck[2:], math.inf]
        return [self._recovery(*times) for times in zip(struck[1:], ends, strict=True)]

    def _recovery(self, struck_at: float, end: float = math.inf) -> Recovery:
        notes = read_notes(self._file)
        starts = (note.at for note in notes if note.at > struck_at and note.event == ">call")
        restarted_at = min(starts, default=math.inf)  # until then, old ranks may end a step
        before = max((note.step for note in notes if note.at < restarted_at), default=0)
        following = [note for note in notes if struck_at < note.at < end]
        notes = [note for note in following if note.step == 0 or note.at > restarted_at]
        return Recovery(struck_at, before, notes)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(CLOCK),
            "NOTES_FILE": str(self._file),
            "NOTED_PLACES": "all",
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
        }
        words = [*TRAIN, *self._settings, f"run_dir={self._folder / 'run'}"]
        with (self._folder / "output").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=output, stderr=output
            )


if __name__ == "__main__":
    raise SystemExit(main())
