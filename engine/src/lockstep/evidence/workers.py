"""Trains runs at the same time, each on its share of the machine.

Workers --threads--> Worker --lines of JSON--> `main`, in a process that trains run after run
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lockstep import commands, processes, project, stop_signals
from lockstep.errors import UserError
from lockstep.exits import Exit
from lockstep.launch import devices
from lockstep.launch.placement import Placement
from lockstep.launch.script import begin
from lockstep.settings import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Job:
    """A run to train: the words of its command, and the file for what it prints."""

    words: tuple[str, ...]
    log: Path


class Worker:
    """A process that trains one run after another. Start it from the main thread.

    The kernel ends it with the thread that started it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours = project.current()
        self._process = subprocess.Popen(
            [*project.python(), "-m", __name__, str(os.getpid()), ours.package or str(ours.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            encoding="utf-8",
            start_new_session=True,  # a Ctrl-C reaches it once, through us
        )

    def train(self, job: Job) -> int:
        """Train a run to its end; return its exit status, 1 if the worker died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"words": job.words, "log": str(job.log)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return int(Exit.FAILED)
        answer = self._process.stdout.readline()
        return int(answer) if answer else int(Exit.FAILED)

    def send_signal(self, signum: signal.Signals) -> None:
        """Pass a signal on to the run."""
        self._process.send_signal(signum)

    def close(self) -> None:
        """End the process, which trains nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


class Workers:
    """Some workers that train jobs until one fails or a signal comes."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    @property
    def count(self) -> int:
        """How many runs train at the same time."""
        return len(self._workers)

    def train(self, jobs: Sequence[Job]) -> dict[Job, int]:
        """Train the jobs in order; after one that fails or a signal, start no other.

        Returns:
            the exit status of each job that was started.
        """
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        statuses: dict[Job, int] = {}

        def work(worker: Worker) -> None:
            while not any(statuses.values()) and stop_signals.received.first is None:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                statuses[job] = worker.train(job)

        with ThreadPoolExecutor(self.count) as threads:
            for outcome in [threads.submit(work, worker) for worker in self._workers]:
                outcome.result()
        return statuses


@contextlib.contextmanager
def started_workers(environments: Sequence[Mapping[str, str]]) -> Iterator[Workers]:
    """Start a worker for each environment; a stop signal goes to all of them."""
    workers = [Worker(environment) for environment in environments]

    def send(signum: signal.Signals) -> None:
        for worker in workers:
            worker.send_signal(signum)

    def stop_at_once() -> None:
        send(signal.SIGKILL)

    stop_signals.received.pass_on(send, stop_at_once)
    try:
        yield Workers(workers)
    finally:
        for worker in workers:
            worker.close()


def environments_of(placement: Placement, at_once: int | None) -> list[dict[str, str]]:
    """Return variables for each run that trains at the same time: its devices, or its threads.

    Args:
        placement: the devices of one run.
        at_once: how many runs; None: as many as fit.

    Raises:
        UserError: so many don't fit.
    """
    if placement.nodes > 1:
        raise UserError(
            "compare trains on one machine; to use several, train the runs first, then use "
            "compare --runs"
        )
    if placement.accelerator == "cuda":
        return _with_gpus(placement.devices, at_once)
    if placement.accelerator == "cpu":
        return _with_cores(placement.devices, at_once)
    return [{}]


def _with_gpus(devices_of_run: int, at_once: int | None) -> list[dict[str, str]]:
    present = [str(number) for number in range(devices.gpu_count())]
    if os.environ.get(VISIBLE):
        present = os.environ[VISIBLE].split(",")[: len(present)]
    fitting = len(present) // devices_of_run
    count = _count(at_once, fitting, f"{counted(len(present), 'GPU')}, {devices_of_run} for a run")
    if count == 1:
        return [{}]
    starts = range(0, count * devices_of_run, devices_of_run)
    return [{VISIBLE: ",".join(present[start : start + devices_of_run])} for start in starts]


def _with_cores(ranks: int, at_once: int | None) -> list[dict[str, str]]:
    """Share the cores; threads that the user has chosen stay, and limit the runs."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    chosen = os.environ.get(THREADS)
    threads = int(chosen) if chosen else 1
    fitting = max(1, cores // (ranks * threads))
    if at_once is None and not chosen:  # one run can use all cores
        at_once = 1
    count = _count(at_once, fitting, f"{counted(cores, 'core')}, {ranks * threads} for a run")
    if not chosen:
        threads = max(1, cores // (ranks * count))
    return [{THREADS: str(threads)}] * count


def _count(at_once: int | None, fitting: int, reason: str) -> int:
    if at_once is not None and at_once > fitting:
        raise UserError(f"--at-once={at_once} runs don't fit: {reason}; set at most {fitting}")
    return at_once or fitting


def main(parent: str, program: str) -> None:
    """Be a worker: read requests, lines of JSON, and answer each with the exit status of its run.

    Args:
        parent: the process that starts this one.
        program: a project's package, or a script.
    """
    processes.end_with_parent(int(parent))
    if program.endswith(".py"):
        begin(Path(program))
    else:
        importlib.import_module(program)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # between two runs
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # runs don't read requests
    for line in requests:
        request = json.loads(line)
        with Path(request["log"]).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        with stop_signals.restored(), processes.name_restored():
            status = commands.train(request["words"])
        sys.stdout.flush()
        answers.write(f"{status}\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
