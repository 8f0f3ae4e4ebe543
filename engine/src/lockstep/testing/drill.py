"""The `drill` command: break small runs on this machine in several ways, and check the outcome.

A run that recovers must end with exactly the same bits as an undisturbed run. A run that cannot
recover must end at once, report the cause, and leave every finished checkpoint intact.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep import project
from lockstep.errors import UserError
from lockstep.launch import flags, hydra_job
from lockstep.launch.flags import count
from lockstep.launch.main import training
from lockstep.settings import counted
from lockstep.testing.experiment import LIMIT, callback
from lockstep.testing.results import rows_of
from lockstep.testing.small_runs import SmallRuns

if TYPE_CHECKING:
    import torch

LOG_STEPS = 3  # from one row to the next, which is written before the one after it
PAUSES = 5  # of a run that is to be stopped: a fast one would be done
# `++` also adds a setting that the program's YAML files leave to a default.
SETTINGS = ["++checkpoint.every=10", "++checkpoint.keep_last=3", "++launch.max_restarts=99"]
STALL_AFTER = 5  # seconds
OF_MEMORY = ("kills between checkpoints", "a flipped bit on the disk")  # which need its setting
MEMORY_EVERY = 5  # steps between states in memory
LEAST_STEPS = 8 * MEMORY_EVERY
SHARES_LEFT = 6.5  # time of all other runs together, in multiples of an undisturbed run's time
RESTART_SECONDS = 5
FROM_MEMORY = re.compile(r"continues from step (\d+), kept in memory")
NO_MEMORY = re.compile(r"^ *memory +off: (.*)$", re.MULTILINE)


class Outcome(NamedTuple):
    """The outcome of one drill."""

    passed: bool
    detail: str


def main(arguments: list[str]) -> int:
    """Run all drills and print their table; return 1 if any drill fails."""
    options, overrides = _parser().parse_known_args(arguments)
    if options.steps < LEAST_STEPS:
        raise UserError(
            f"--steps={options.steps} are too few for a state in memory before the first kill; "
            f"give at least {LEAST_STEPS}"
        )
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        drill = Drill(Path(folder), options, overrides)
        size = f"{counted(options.ranks, 'rank')}, {counted(options.steps, 'step')} each"
        print(f"drills with {size}; the first shows how long the others take", flush=True)
        passed = drill.run()
    return 0 if passed else 1


def shocks(faults: int) -> str:
    """Describe how many random faults a run gets."""
    return f"{faults} kills and stops of ranks" if faults != 1 else "1 kill or stop of a rank"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=project.typed("drill"),
        description="Break small runs on this machine in many ways. Each must recover or fail "
        f"cleanly. Other arguments go to `{project.typed('train')}`, for example trainer=gpu.",
        epilog=f"`{project.typed('check')}` compares 1, 2, and 4 ranks bit by bit.",
    )
    parser.add_argument("--ranks", type=count, default=2, help="devices of each run (default: 2)")
    parser.add_argument("--steps", type=count, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--faults", type=int, default=8, help="random faults (default: 8)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random faults")
    return parser


class Drill(SmallRuns):
    """Runs of one small experiment below `folder`; one of them is left undisturbed."""

    def __init__(self, folder: Path, options: argparse.Namespace, overrides: list[str]) -> None:
        self.ranks: int = options.ranks
        self.steps: int = options.steps
        self.faults: int = options.faults
        self.random = random.Random(options.seed)
        size = [f"trainer.devices={options.ranks}", f"max_steps={options.steps}"]
        words = project.with_small_experiment([f"log_every={LOG_STEPS}", *overrides])
        super().__init__(folder, [*SETTINGS, *size], words)
        project.current().refuse_to_train_nothing()
        (self.values,) = flags.each_job(training(), self.words, hydra_job.values_to_freeze)

    def run(self) -> bool:
        """Run the drills in order; report when each begins and ends. Return False if one failed."""
        passed = self._run_and_report("a run without faults", self.undisturbed)
        if not passed:  # there is nothing to compare with
            return False
        left = SHARES_LEFT * self.seconds + RESTART_SECONDS * (self.faults + 3)
        print(f"  about {math.ceil(left / 60)} min to go", flush=True)
        drills: dict[str, Callable[[], Outcome]] = {
            shocks(self.faults): self.random_kills,
            "kills between checkpoints": self.kills_between_checkpoints,
            "a second command on a run": self.second_command,
            "kill -9 of the command": self.killed_parent,
            "SIGTERM to the command": self.stopped_parent,
            "a flipped bit on the disk": self.flipped_bit,
            "a NaN on one rank": self.broken_gradient,
            "a rank that hangs": self.hanging_rank,
        }
        if "memory" not in self.values:
            for name in OF_MEMORY:
                del drills[name]
            print(
                f"  left out: {', '.join(OF_MEMORY)}: {project.typed('train')} has no setting "
                "memory for StateInMemory(run, every=memory)",
                flush=True,
            )
        outcomes = [self._run_and_report(name, drill) for name, drill in drills.items()]
        return all(outcomes)

    def _run_and_report(self, name: str, drill: Callable[[], Outcome]) -> bool:
        print(f"  begins  {name}", flush=True)
        passed, detail = drill()
        verdict = "ok    " if passed else "FAILED"
        print(f"  {verdict}  {name:<34}{detail}", flush=True)
        return passed

    def undisturbed(self) -> Outcome:
        """Train once without a fault, as the reference for the other runs."""
        started = time.monotonic()
        status, errors = self.train("whole")
        self.seconds = time.monotonic() - started
        if status:
            return Outcome(False, f"exit {status}: {errors.strip()}")
        return Outcome(True, f"{self.seconds:.0f} s")

    def random_kills(self) -> Outcome:
        """Send SIGKILL or SIGTERM to a random rank at random steps."""
        steps = sorted(self.random.sample(range(5, self.steps - 5), self.faults))
        plan = [
            f"{step}:{self.random.randrange(self.ranks)}:{self.random.choice(KILLS)}"
            for step in steps
        ]
        status, errors = self.train("hit", *self._faults("hit", plan))
        recovered = self._recoveries("hit", plan)
        slowest = f"{max(recovered):.1f} s at most to the next step" if recovered else ""
        restarts = counted(errors.count("restarting"), "restart")
        detail = f"{restarts}, {slowest}, {self._bits('hit')}"
        return Outcome(self._equal("hit", status), detail)

    def kills_between_checkpoints(self) -> Outcome:
        """Kill one rank, another, and then all: the run continues from its state in memory."""
        quarters = (quarter * self.steps // 4 for quarter in (1, 2, 3))
        steps = [quarter - quarter % MEMORY_EVERY - 1 for quarter in quarters]  # before a state
        victims = zip(steps, ([self.ranks - 1], [0], range(self.ranks)), strict=True)
        plan = [f"{step}:{rank}:SIGKILL" for step, ranks in victims for rank in ranks]
        settings = [f"checkpoint.every={self.steps}", f"memory={MEMORY_EVERY}"]
        status, _ = self.train("kept", *self._faults("kept", plan), *settings)
        log = self.directory("kept").log.read_text(encoding="utf-8")
        kept = [*map(int, FROM_MEMORY.findall(log))]
        # A rank that is late is ended with the first of the last kills, and killed once more.
        most = [*steps, *steps[-1:] * (self.ranks - 1)]
        lost = max((step - state for step, state in zip(most, kept, strict=False)), default=-1)
        passed = len(steps) <= len(kept) <= len(most) and lost <= MEMORY_EVERY
        detail = f"{counted(lost, 'step')} lost at most, {MEMORY_EVERY} between states in memory"
        off = NO_MEMORY.search(log)  # on another system than Linux, for example
        if off:
            passed = True
            detail = f"no state in memory: {off[1]}"
        return Outcome(passed and self._equal("kept", status), f"{detail}, {self._bits('kept')}")

    def second_command(self) -> Outcome:
        """Start a run again: rejected while it is running, without changes once it is done."""
        before = self._content("whole")
        again, _ = self.train("whole", resume=True)
        unchanged = again == 0 and self._content("whole") == before
        process = self.start("orphan", *self._hanging("orphan", self.steps // 3))
        self.wait_for_step("orphan", 1, process)
        status, errors = self.train("orphan", resume=True)
        process.kill()
        process.communicate()
        self.gone("orphan")
        for path in self.folder.glob("orphan*"):
            shutil.rmtree(path)
        detail = f"exit {status} while it runs, {again} when it is done"
        return Outcome(unchanged and status == 2 and "is in use by process" in errors, detail)

    def killed_parent(self) -> Outcome:
        """Send SIGKILL to the command: no process outlives it, and the run resumes."""
        process = self.start("orphan", *self._hanging("orphan", self.steps // 3))
        self._wait_for_hang("orphan", process)
        process.kill()
        process.communicate()
        orphans = self.gone("orphan")
        status, _ = self.train("orphan", resume=True)
        detail = f"{orphans} processes left, resumed, {self._bits('orphan')}"
        passed = self._equal("orphan", status) and not orphans
        return Outcome(passed, detail)

    def stopped_parent(self) -> Outcome:
        """Send SIGTERM to the command: it saves, exits with 143, and can be resumed."""
        at = self.steps // 3
        pauses = [f"{at + more}:0:pause" for more in range(PAUSES)]
        process = self.start("stopped", *self._faults("stopped", pauses))
        self.wait_for_step("stopped", at - 2 * LOG_STEPS, process)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
        seconds = time.monotonic() - started
        status, _ = self.train("stopped", resume=True)
        passed = process.returncode == 128 + signal.SIGTERM and self._equal("stopped", status)
        detail = f"exit {process.returncode} after {seconds:.1f} s, {self._bits('stopped')}"
        return Outcome(passed, detail)

    def flipped_bit(self) -> Outcome:
        """Damage the newest checkpoint: the run must resume from the one before it."""
        from lockstep.checkpoints.reading import checkpoints_in

        hanging = self._hanging("flipped", 3 * self.steps // 4)
        process = self.start("flipped", *hanging, "memory=false")  # a newer state there is used
        folder = self.directory("flipped").checkpoints
        self._wait_for_hang("flipped", process)
        process.kill()
        process.communicate()
        self.gone("flipped")
        newest = checkpoints_in(folder)[-1]
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
        status, _ = self.train("flipped", resume=True)
        log = self.directory("flipped").log.read_text(encoding="utf-8")
        set_aside = f"skipped {newest}" in log
        set_aside = set_aside and (newest.parent / "damaged" / newest.name).is_file()
        outcome = "set aside" if set_aside else "NOT SET ASIDE"
        detail = f"{outcome}, {self._bits('flipped')}"
        return Outcome(self._equal("flipped", status) and set_aside, detail)

    def broken_gradient(self) -> Outcome:
        """NaN on one rank: all ranks stop, the weights unchanged, the checkpoints intact."""
        at = self.steps // 2
        status, errors = self.train("nan", *self._faults("nan", [f"{at}:{self.ranks - 1}:nan"]))
        # ClipAndSkip tells at once; without it, the next save does.
        is_told = re.search(r"step \d+: .*not finite", errors) is not None
        return Outcome(status == 1 and is_told and self._sound("nan"), f"exit {status}")

    def hanging_rank(self) -> Outcome:
        """One rank hangs: the run prints its stack and ends."""
        started = time.monotonic()
        status, errors = self.train("hang", *self._hanging("hang", self.steps // 2), *self._guard())
        is_told = f"no step for {STALL_AFTER} s" in errors
        passed = status == 1 and is_told and self._sound("hang")
        seconds = time.monotonic() - started
        detail = f"exit {status} after {seconds:.0f} s, a limit of {STALL_AFTER} s"
        return Outcome(passed, detail)

    def _guard(self) -> list[str]:
        """Return what sets the limit of a step: the program's guard, or one for this run."""
        if "guard" in self.values:
            return [f"++guard.stall_after={STALL_AFTER}"]
        return callback("guard", "lockstep.Guards", stall_after=STALL_AFTER)

    def _hanging(self, name: str, step: int) -> list[str]:
        """Return what lets the last rank hang at a step: a fast run is then still there."""
        return self._faults(name, [f"{step}:{self.ranks - 1}:hang"])

    def _wait_for_hang(self, name: str, process: subprocess.Popen[str]) -> None:
        """Wait until a rank hangs, which it does once: a resumed run goes on."""
        notes = self.folder / f"{name}.faults"
        self.wait_until(lambda: any(notes.glob("*:hang")), process)

    def _faults(self, name: str, plan: list[str]) -> list[str]:
        notes = self.folder / f"{name}.faults"
        notes.mkdir()
        target = "lockstep.testing.faults.Faults"
        return callback("faults", target, folder=notes, plan=f"[{','.join(map(repr, plan))}]")

    def _content(self, name: str) -> dict[Path, bytes]:
        files = (path for path in (self.folder / name).rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    def _recoveries(self, name: str, plan: list[str]) -> list[float]:
        """Return the seconds from each fault to the end of the next step."""
        from lockstep.testing.faults import STARTS

        folder = self.folder / f"{name}.faults"
        struck = [(folder / fault).stat().st_mtime for fault in plan if (folder / fault).exists()]
        starts = [float(line) for line in (folder / STARTS).read_text(encoding="ascii").split()]
        return [min(start for start in [*starts, time.time()] if start > at) - at for at in struck]

    def _equal(self, name: str, status: int) -> bool:
        is_same = self._differing(name) == 0 and self._differing_rows(name) == 0
        return status == 0 and is_same and self._sound(name)

    def _bits(self, name: str) -> str:
        rows = counted(self._differing_rows(name), "row")
        return f"{self._differing(name)} differing weights, {rows}"

    def _differing_rows(self, name: str) -> int:
        """Count the rows of metrics.csv that differ from the undisturbed run's, except times."""
        ours, theirs = (rows_of(self.directory(run)) for run in (name, "whole"))
        pairs = itertools.zip_longest(ours, theirs)
        return sum(our_row != their_row for our_row, their_row in pairs)

    def _differing(self, name: str) -> int:
        """Count the weights whose bits differ from those of the undisturbed run."""
        ours, theirs = (self._weights(run) for run in (name, "whole"))
        if ours.keys() != theirs.keys():
            return sum(weight.numel() for weight in theirs.values())
        return sum(int((ours[key] != theirs[key]).sum()) for key in theirs)

    def _weights(self, name: str) -> dict[str, torch.Tensor]:
        folder = self.directory(name).checkpoints
        path = folder / f"step={self.steps:06d}.ckpt"
        if not path.is_file():
            return {}
        import torch  # imported here to keep --help fast

        return dict(torch.load(path, weights_only=True)["state_dict"])

    def _sound(self, name: str) -> bool:
        from lockstep.checkpoints.reading import checkpoints_in
        from lockstep.checkpoints.sums import fault_of

        checkpoints = checkpoints_in(self.directory(name).checkpoints)
        return bool(checkpoints) and all(fault_of(path) is None for path in checkpoints)


KILLS = ["SIGKILL", "SIGTERM"]
