"""Kill processes of runs again and again: which steps are computed twice, and are all bits equal?

usage: python lab/benchmarks/lost_steps.py [--runs 20] [--kills 10] [--seed 1]

Each of `--runs` runs loses processes `--kills` times, at random moments, also while it recovers:

- ranks: one to three of its two to four ranks
- writing: a rank, while a machine's newest state is being written to memory
- unreadable: ranks; until the next new step, nobody may enter the folder of checkpoints
- agent, command: of one machine

Every other run is on two machines: network namespaces, each with a /dev/shm of its own. AdamW and
Muon alternate. A command that ends early is typed again. Prints a line per run and, also after
Ctrl-C, a table of medians. Exits with 1 if a run's weights, optimizer state, or metrics.csv (except
times) differ from those of an undisturbed run, if it leaves states in memory, or if it computes
more steps twice than two states are apart (half the kills: more than one interval). Needs root,
iproute2, and util-linux.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kills import KINDS
from lockstep.memory.files import SEAL_BYTES
from lockstep.run.directory import RunDirectory
from lockstep.testing.results import Results as ResultsOfRun
from lockstep.testing.results import differences, results_of
from notes import CLOCK, Note, read_notes
from process_tree import tree, words_of

STEPS = 600
EVERY = 5  # steps between states in memory
SAVED_EVERY = 100  # steps between checkpoints
LIMIT = 420.0  # seconds of a run
PAUSE = (0.0, 2.5)  # seconds from a new step to the next kill
AGAIN = 0.15  # share of the kills that come while the run recovers
WORDS = [
    "experiment=smoke",
    "trainer=cpu",
    "strategy=ddp",
    "logger=none",
    "callbacks=[]",
    "batch.global_size=12",
    "model.dropout=0.1",
    "val_every=1000",
    f"max_steps={STEPS}",
    f"checkpoint.every={SAVED_EVERY}",
    f"memory={EVERY}",
    "launch.max_restarts=999",
    "resume=auto",
    "run_dir=run",
    "data.root=../data",
    "+callbacks.steps._target_=noted_steps.Steps",
]
ATTACKS = {"ranks": 5, "writing": 3, "unreadable": 2, "agent": 1, "command": 1}  # weights
SHAPES = [(2, 1), (2, 2), (3, 1), (4, 2), (4, 1)]  # ranks, machines
PR_CAPBSET_DROP = 24  # of prctl(2)
OVERRIDES = (1, 2)  # the capabilities with which root may ignore permissions


class Machine:
    """A network namespace with its own /dev/shm; its processes are started with `prefix`."""

    def __init__(self, number: int) -> None:
        self.address = f"10.78.0.{number + 1}"
        self._keeper = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"])
        self.pid = self._keeper.pid
        self.prefix = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--wd=."]
        while words_of(self.pid).split()[:1] != ["sleep"]:
            time.sleep(0.01)
        self.call("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.call("ip", "link", "set", "lo", "up")

    def call(self, *words: str) -> None:
        """Run a program on this machine."""
        subprocess.run([*self.prefix, *words], check=True, cwd="/")

    def connect(self, other: Machine) -> None:
        """Make a link between two machines."""
        here, there = f"kill{self.pid}", f"kill{other.pid}"
        ends = ["ip", "link", "add", here, "netns", str(self.pid), "type", "veth", "peer"]
        subprocess.run([*ends, "name", there, "netns", str(other.pid)], check=True)
        for machine, link in ((self, here), (other, there)):
            machine.call("ip", "addr", "add", f"{machine.address}/24", "dev", link)
            machine.call("ip", "link", "set", link, "up")

    def slots(self, folder: str) -> list[Path]:
        """Return the files in shared memory of the run with this folder."""
        return [*Path(f"/proc/{self.pid}/root/dev/shm/{folder}").glob("*.[01]")]

    def remove(self) -> None:
        """End the namespaces."""
        self._keeper.kill()
        self._keeper.wait()


class Kill(NamedTuple):
    """One attack."""

    at: float  # seconds since 1970
    kind: str
    processes: int


@dataclass
class AttackedRun:
    """A run on one or two machines, whose commands are typed again until it is done."""

    folder: Path
    ranks: int
    optimizer: str
    machines: list[Machine]
    kills: list[Kill] = field(default_factory=list)
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)
    typed: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def directory(self) -> RunDirectory:
        """Return the run's directory."""
        return RunDirectory(self.folder / "run")

    def start(self) -> None:
        """Type the command on each machine."""
        self.folder.mkdir()
        self.commands = [self._type(number) for number in range(len(self.machines))]

    def _type(self, number: int) -> subprocess.Popen[bytes]:
        self.typed += 1
        devices = self.ranks // len(self.machines)
        words = [*WORDS, f"optim={self.optimizer}", f"trainer.devices={devices}"]
        if len(self.machines) > 1:
            words += [
                "trainer.num_nodes=2",
                f"launch.node_rank={number}",
                f"launch.rdzv_endpoint={self.machines[0].address}:29600",
            ]
        command = [sys.executable, "-m", "lockstep_gpt", "train", *words]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(CLOCK), os.environ.get("PYTHONPATH", "")]),
            "NOTES_FILE": str(self.folder / "notes"),
        }
        with (self.folder / f"output{number}").open("ab") as output:
            return subprocess.Popen(
                [*self.machines[number].prefix, *command],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=drop_overrides,
            )

    def is_done(self) -> bool:
        """Return whether all commands have ended well; type those again that have not."""
        if time.monotonic() - self.started > LIMIT:
            raise TimeoutError(f"not done after {LIMIT:g} s")
        for number, command in enumerate(self.commands):
            if command.poll():
                time.sleep(0.3)  # its processes end
                self.commands[number] = self._type(number)
        return all(command.poll() == 0 for command in self.commands)

    def notes(self) -> list[Note]:
        """Return the steps of all attempts."""
        return read_notes(self.folder / "notes")

    def newest_step(self) -> int:
        """Return the newest step of all attempts."""
        return max((note.step for note in self.notes()), default=0)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition is true; return False if the run is done before."""
        while not condition():
            if self.is_done():
                return False
            time.sleep(0.03)
        return True

    def attack(self, kind: str, chance: random.Random) -> None:
        """Kill processes; return once the run has gone on, or soon."""
        if kind == "unreadable" and self.kills:  # a command that is typed now would refuse the run
            self.wait_for(lambda: self.has_recovered(self.kills[-1].at))
        newest = self.newest_step()
        hidden = contextlib.nullcontext()
        if kind == "unreadable":
            left = SAVED_EVERY - newest % SAVED_EVERY
            if left >= SAVED_EVERY // 2 and SAVED_EVERY < newest < STEPS - SAVED_EVERY:
                hidden = unreadable(self.directory.checkpoints)
            else:
                kind = "ranks"  # there is no save yet, or one is due soon, and would fail
        if kind == "writing" and not self.wait_for(self._is_writing):
            return
        victims = self._victims(kind, chance)
        with hidden:
            at = time.time()
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.kills.append(Kill(at, kind, len(victims)))
            if kind == "unreadable" or chance.random() > AGAIN:
                self.wait_for(lambda: self.has_recovered(at))

    def has_recovered(self, at: float) -> bool:
        """Return whether another attempt has computed a new step since a moment."""
        notes = self.notes()
        before = [note for note in notes if note.at < at]
        known = {note.pid for note in before}
        newest = max((note.step for note in before), default=0)
        return any(note.step > newest and note.pid not in known for note in notes)

    def _is_writing(self) -> bool:
        """Return whether a slot is being written: its header is cleared."""
        token = self.directory.token()
        for _ in range(200):
            for machine in self.machines:
                slots = machine.slots(f"lockstep-gpt-{os.geteuid()}-{token}")
                seals = [seal_of(path) for path in slots]
                if len(seals) > 1 and any(seal == bytes(SEAL_BYTES) for seal in seals):
                    return True
        return False

    def _victims(self, kind: str, chance: random.Random) -> list[int]:
        machine = chance.randrange(len(self.machines))
        trees = [tree(command.pid) for command in self.commands]
        if kind == "command":
            return [self.commands[machine].pid]
        if kind == "agent":
            return [pid for pid in trees[machine] if kind_of(pid) == "agent"]
        ranks = [pid for pids in trees for pid in pids if kind_of(pid) == "rank"]
        count = 1 if kind == "writing" else chance.randint(1, 3)
        return chance.sample(ranks, min(count, len(ranks)))

    def repeated(self) -> list[int]:
        """Return, for each attempt after the first, how many steps it computed again."""
        attempts: dict[int, list[int]] = {}
        for note in self.notes():
            attempts.setdefault(note.pid, []).append(note.step)
        steps = [*attempts.values()]
        pairs = itertools.pairwise(steps)
        return [max(0, before[-1] - after[0] + 1) for before, after in pairs]

    def faults(self, expected: ResultsOfRun) -> list[str]:
        """Return how the run, which is done, is not as it should be."""
        differing = differences(expected, results_of(self.directory))
        faults = [f"differ: {differing.text()}"] if differing else []
        if any(machine.slots("*") for machine in self.machines):
            faults.append("states stay in memory")
        repeated = self.repeated()
        if repeated and max(repeated) > 2 * EVERY:
            faults.append(f"{max(repeated)} steps computed twice")
        if repeated and statistics.median(repeated) > EVERY:
            faults.append("more than one interval computed twice by half the attempts")
        return faults


def main() -> int:
    """Attack the runs; return 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="(default: 20)")
    parser.add_argument("--kills", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the random kills")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("only root can make network namespaces; use sudo")
    chance = random.Random(options.seed)
    machines = [Machine(number) for number in range(2)]
    try:
        machines[0].connect(machines[1])
        with tempfile.TemporaryDirectory(
            prefix="lost-steps-", ignore_cleanup_errors=True
        ) as folder:
            return attack_runs(Path(folder), machines, options.runs, options.kills, chance)
    finally:
        for machine in machines:
            machine.remove()


class Results:
    """What the attacked runs have shown so far."""

    def __init__(self) -> None:
        self.repeated: dict[str, list[int]] = {}  # steps computed again, by the runs' shape
        self.kills: Counter[str] = Counter()
        self.runs = 0
        self.wrong = 0

    def add(self, run: AttackedRun, faults: list[str]) -> None:
        """Note a run, and print its line."""
        places = len(run.machines)
        counts = run.repeated()
        name = f"{run.ranks} ranks on {places} machine{'s' * (places > 1)}, {run.optimizer}"
        self.repeated.setdefault(name, []).extend(counts)
        self.kills.update(kill.kind for kill in run.kills)
        self.runs += 1
        self.wrong += bool(faults)
        print(
            f"{'WRONG' if faults else 'ok   '} {name:30} {len(run.kills):3} kills, "
            f"{run.typed - places:2} commands again, {sum(counts):3} steps twice, "
            f"at most {max(counts, default=0)} at once  {'; '.join(faults)}",
            flush=True,
        )

    def show(self) -> None:
        """Print the table."""
        print(f"\n{'steps computed twice after a start':36}  starts  median  largest")
        everything = [step for counts in self.repeated.values() for step in counts]
        for name, counts in {**self.repeated, "all": everything}.items():
            if counts:
                print(f"{name:36}{len(counts):8}{statistics.median(counts):8g}{max(counts):9}")
        kinds = ", ".join(f"{kind} {number}" for kind, number in self.kills.items())
        print(f"an interval has {EVERY} steps; {self.kills.total()} kills: {kinds}")
        print(f"{self.runs - self.wrong} of {self.runs} runs ended as they should")


def attack_runs(
    folder: Path, machines: list[Machine], count: int, kills: int, chance: random.Random
) -> int:
    """Attack `count` runs, or fewer until Ctrl-C; return 1 if one is not as it should be."""
    expected: dict[tuple[int, int, str], ResultsOfRun] = {}
    results = Results()
    try:
        for number in range(count):
            ranks, places = SHAPES[number % len(SHAPES)]
            optimizer = ("adamw", "muon")[number // len(SHAPES) % 2]
            shape = (ranks, places, optimizer)
            if shape not in expected:
                name = f"undisturbed-{ranks}-{places}-{optimizer}"
                undisturbed = AttackedRun(folder / name, ranks, optimizer, machines[:places])
                undisturbed.start()
                undisturbed.wait_for(lambda: False)
                expected[shape] = results_of(undisturbed.directory)
            run = AttackedRun(folder / str(number), ranks, optimizer, machines[:places])
            results.add(run, attack_run(run, kills, chance) or run.faults(expected[shape]))
    except KeyboardInterrupt:
        pass
    results.show()
    return 1 if results.wrong else 0


def attack_run(run: AttackedRun, kills: int, chance: random.Random) -> list[str]:
    """Start a run, attack it `kills` times, and let it end; return why it can't be compared."""
    run.start()
    try:
        run.wait_for(lambda: run.newest_step() > 2 * EVERY)
        while len(run.kills) < kills and run.newest_step() < STEPS - 2 * EVERY:
            moment = time.monotonic() + chance.uniform(*PAUSE)
            run.wait_for(lambda moment=moment: time.monotonic() > moment)
            run.attack(chance.choices([*ATTACKS], [*ATTACKS.values()])[0], chance)
        run.wait_for(lambda: False)
    except TimeoutError as fault:
        outputs = [path.read_text()[-1500:] for path in sorted(run.folder.glob("output*"))]
        return [str(fault), *outputs]
    finally:
        for command in run.commands:
            command.kill()
            command.wait()
    return []


def kind_of(pid: int) -> str:
    """Return what a process is, one of the values of `KINDS`, or an empty string."""
    words = words_of(pid)
    return next((kind for part, kind in KINDS.items() if part in words), "")


def seal_of(path: Path) -> bytes:
    """Return the first bytes of a slot; none if it has just been removed."""
    try:
        with path.open("rb") as file:
            return file.read(SEAL_BYTES)
    except FileNotFoundError:
        return b""


def drop_overrides() -> None:
    """Let a program obey permissions, though root starts it: the next `exec` drops the rest."""
    library = ctypes.CDLL(None, use_errno=True)
    for capability in OVERRIDES:
        if library.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_DROP)")


@contextlib.contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Let nobody enter a folder, not even to list it."""
    mode = folder.stat().st_mode
    folder.chmod(0)
    try:
        yield
    finally:
        folder.chmod(mode)


if __name__ == "__main__":
    raise SystemExit(main())
