"""Check that a run recovers from the death of any of its processes, and leaves none behind.

usage: python lab/benchmarks/kills.py [--kills 100] [--seed 1]

Each run of two ranks loses one process at a random moment, from the start of the command on: the
command or torchrun, the agent, a rank, or wandb's service. Runs start in turn with an agent and
under torchrun. If the run has not finished, the same command is typed again. Prints a line per
kill; exits with 1 if a process outlives its run by more than 10 s, or if the weights differ from
those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lockstep.exits import Exit
from lockstep.run.directory import RunDirectory
from process_tree import LIMIT, processes_in, tree, words_of

SECONDS_LEFT = 10.0  # how long a process may outlive its command
RANKS = 2
STEPS = 60
TRAIN = ["-m", "lockstep_gpt", "train"]
WORDS = [
    "experiment=smoke",
    "trainer=cpu",
    "strategy=ddp",
    "logger=wandb",
    f"max_steps={STEPS}",
    "checkpoint.every=10",
    "resume=auto",
]
TORCHRUN = ["-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "--max-restarts=2"]
LAUNCHES = {
    "agent": [*TRAIN, *WORDS, f"trainer.devices={RANKS}"],
    "torchrun": [*TORCHRUN, *TRAIN, *WORDS],
}
KINDS = {  # a part of the command line: what a process is
    "torch.distributed.run": "torchrun",
    "agent_program": "agent",
    "rank_program": "rank",
    "wandb": "wandb's service",
}


@dataclass
class KilledRun:
    """A run, which loses processes, and what was seen of it."""

    folder: Path
    launch: str
    killed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # command lines of processes that stayed
    statuses: list[int] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        """Type the command in the run's folder."""
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, *LAUNCHES[self.launch], "run_dir=run", "data.root=../data"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output
            )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the command's end, and then for that of its processes."""
        try:
            self.statuses.append(process.wait(LIMIT))
        except subprocess.TimeoutExpired:
            self.statuses.append(999)
            process.kill()
            process.wait()
        end = time.monotonic() + SECONDS_LEFT
        while processes_in(self.folder) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in processes_in(self.folder):
            self.left.append(words_of(pid)[:60])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_one(self, process: subprocess.Popen[bytes], chance: random.Random) -> None:
        """Kill a random process of the command."""
        pids = [pid for pid in tree(process.pid) if words_of(pid)]
        if process.poll() is not None or not pids:
            self.killed.append("nobody")
            return
        victim = chance.choice(pids)
        self.killed.append(self._kind(victim, process.pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the last checkpoint by name."""
        path = RunDirectory(self.folder / "run").checkpoints / f"step={STEPS:06d}.ckpt"
        state = torch.load(path, weights_only=True)["state_dict"]
        return dict(state)

    def _kind(self, pid: int, command: int) -> str:
        words = words_of(pid)
        if pid == command and self.launch != "torchrun":
            return "command"
        for part, kind in KINDS.items():
            if part in words:
                return kind
        return "rank" if "lockstep_gpt" in words else words[:40]


def main() -> int:
    """Hurt runs, and compare each with an undisturbed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="so many runs (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the random kills")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        return hurt_runs(Path(folder).resolve(), options.kills, random.Random(options.seed))


def hurt_runs(folder: Path, kills: int, chance: random.Random) -> int:
    """Return 1 if a run of `kills` ended otherwise than it should; print a line for each."""
    seconds = {}
    for launch in LAUNCHES:
        undisturbed = KilledRun(folder / launch, launch)
        started = time.monotonic()
        undisturbed.finish(undisturbed.start())
        seconds[launch] = time.monotonic() - started
        assert undisturbed.statuses == [Exit.DONE], (folder / launch / "output").read_text()
    expected = undisturbed.weights()
    wrong = 0
    for number in range(kills):
        launch = [*LAUNCHES][number % len(LAUNCHES)]
        moment = chance.uniform(0, seconds[launch])
        run = KilledRun(folder / str(number), launch)
        process = run.start()
        time.sleep(moment)
        run.kill_one(process, chance)
        run.finish(process)
        while run.statuses[-1] != Exit.DONE and len(run.statuses) < 3:
            run.finish(run.start())
        fault = fault_of(run, expected)
        wrong += bool(fault)
        line = f"{launch:8} {run.killed[0]:16} after {moment:5.2f} s, exit {run.statuses}"
        print(f"{'WRONG' if fault else 'ok   '} {number:3} {line} {fault}", flush=True)
    print(f"{kills - wrong} of {kills} ended as they should")
    return 1 if wrong else 0


def fault_of(run: KilledRun, expected: dict[str, torch.Tensor]) -> str:
    """Return how a run differs from what it should be, or an empty string."""
    if run.left:
        return f"left behind: {run.left}"
    if run.statuses[-1] != Exit.DONE:
        return (run.folder / "output").read_text()[-600:]
    weights = run.weights()
    differing = [name for name in expected if not torch.equal(weights[name], expected[name])]
    return f"{len(differing)} tensors differ" if differing else ""


if __name__ == "__main__":
    raise SystemExit(main())
