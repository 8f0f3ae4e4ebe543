"""Servers of forks, from the requester's side.

A requester must be an ancestor of its server (`warm/fork.py` explains why). A command starts one
as a program, `warm/program.py`. The agent, which is itself a fork of a process that has imported
everything, forks its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.warm import fork
from lockstep_gpt.extras.warm.fork import (
    GO,
    Job,
    libc,
    receive,
    serve,
    show_command_line,
)
from lockstep_gpt.extras.warm.warm_settings import WarmSettings
from lockstep_gpt.launch import agent_program
from lockstep_gpt.run.directory import RunDirectory

AGENT = "lockstep_gpt.extras.warm.forking_agent:main"
PROGRAM = "lockstep_gpt.extras.warm.program"  # a server, as the argument of `python -m`
# Imports all that a run of wandb needs.
OF_WANDB = "lockstep_gpt.run.loggers.wandb_patches"
# Prefixes of variables that libraries read on import: a server and its forks must share them.
READ_ON_IMPORT = (
    "CUDA_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH",
)
ANSWER_SECONDS = 60.0  # a fork takes milliseconds; if there is no answer by then, it failed
# Of prctl(2).
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37


class ServerGoneError(Exception):
    """The server ended, or does not answer: start the process without it."""


class Child:
    """A forked process, with the parts of `subprocess.Popen`'s interface that we use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, -n after signal n; None while the process runs."""
        return self._reap(os.WNOHANG)

    def _reap(self, options: int) -> int | None:
        if self.returncode is not None:
            return self.returncode
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:
            if self.returncode is None:  # else a signal handler has reaped it meanwhile
                raise
        else:
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; return its exit status.

        Raises:
            TimeoutExpired: it has not ended after `timeout` seconds.
        """
        options = 0
        end = math.inf
        if timeout is not None:
            options = os.WNOHANG
            end = time.monotonic() + timeout
        while True:
            status = self._reap(options)
            if status is not None:
                return status
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout or 0)
            time.sleep(0.01)

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Server:
    """The requester's end of the socket to a server."""

    def __init__(self, connection: socket.socket, process: Child | subprocess.Popen[bytes]) -> None:
        self._connection = connection
        self.process = process

    @classmethod
    def started(cls, environment: Mapping[str, str], modules: Sequence[str] = ()) -> Server:
        """Start a server as a program; it first imports everything that we fork, and `modules`."""
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = [str(theirs.fileno()), str(os.getpid())]
            words = [sys.executable, "-m", PROGRAM, *numbers, *modules]
            process = subprocess.Popen(
                words, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
        return cls(ours, process)

    @classmethod
    def forked(cls, name: str) -> Server:
        """Fork a server from this process, which has imported everything and has one thread.

        Args:
            name: the name that `ps` shows for it.
        """
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            fork.end_with(parent)
            ours.close()
            show_command_line([PROGRAM, name])
            serve(theirs)
        theirs.close()
        ours.settimeout(ANSWER_SECONDS)
        return cls(ours, Child(pid))

    def fork(
        self,
        target: str,
        arguments: Sequence[Any],
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        streams: Sequence[int] = (0, 1, 2),
    ) -> list[Child]:
        """Start `target` in one process for each of `environments`; see `Job`.

        Args:
            streams: descriptors of their standard input, output, and error output.

        Raises:
            ServerGoneError: there is no new process.
        """
        job = Job(
            target=target,
            arguments=[*arguments],
            words=[*words],
            environments=[*map(dict, environments)],
            folder=str(Path.cwd()),
            requester=os.getpid(),
        )
        # Forked processes wait for a byte from us, and end without it. So a server that dies
        # halfway leaves no processes behind that we do not know of.
        wait, go = os.pipe()
        try:
            with _adopting():
                pids = self._request(job, [*streams, wait])
            os.write(go, GO * len(pids))
        except OSError as error:
            self.close()
            raise ServerGoneError(str(error)) from error
        finally:
            os.close(wait)
            os.close(go)
        return [Child(pid) for pid in pids]

    def _request(self, job: Job, descriptors: list[int]) -> list[int]:
        text = json.dumps(asdict(job)).encode()
        with _opened(descriptors) as open_descriptors:
            socket.send_fds(self._connection, [len(text).to_bytes(8)], open_descriptors)
        self._connection.sendall(text)
        size = int.from_bytes(receive(self._connection, 8))
        pids = json.loads(receive(self._connection, size))
        if len(pids) != len(job.environments):
            raise OSError(f"{len(pids)} of {len(job.environments)} processes were forked")
        return [int(pid) for pid in pids]

    def close(self) -> None:
        """End the server; its forks keep running."""
        self._connection.close()
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # it is still importing, or stopped
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the one to which the kernel gives orphaned descendants."""
    library = libc()
    before = ctypes.c_int()
    library.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        library.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@contextlib.contextmanager
def _opened(descriptors: list[int]) -> Iterator[list[int]]:
    """Replace closed descriptors, such as a daemon's standard input, with /dev/null."""
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123 (a device, no file)
        yield [
            descriptor if _is_open(descriptor) else nothing.fileno() for descriptor in descriptors
        ]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# Servers that a command keeps for the jobs of a sweep, one for each relevant environment.
_servers: dict[str, Server] = {}
_keepers = 0


@contextlib.contextmanager
def keep_servers() -> Iterator[None]:
    """Keep the servers of all runs that start inside this; the jobs of a sweep share them."""
    global _keepers
    _keepers += 1
    try:
        yield
    finally:
        _keepers -= 1
        while not _keepers and _servers:
            _servers.popitem()[1].close()


def _wanted(config: Config) -> bool | None:
    return WarmSettings.of(config).enabled


def is_possible(config: Config) -> bool:
    """Return whether a run's ranks can be forks here, and may be."""
    has_processes = Path("/proc/self/cwd").exists()  # not on other systems, nor in all containers
    return sys.platform == "linux" and has_processes and _wanted(config) is not False


def refuse_impossible(config: Config) -> None:
    """Raise a `UserError` if a run's ranks must be forks but cannot be."""
    if _wanted(config) and not is_possible(config):
        raise UserError("warm.enabled=true needs Linux and its /proc; remove it, or set false")


def start_agent(
    run: RunDirectory, node_rank: int, config: Config, environment: dict[str, str]
) -> Child | None:
    """Fork the agent of `run` on this machine; None if that is impossible.

    Call it inside `keep_servers`.
    """
    if not is_possible(config):
        return None
    words = agent_program.command(run, node_rank)[2:]
    modules = [OF_WANDB] if "wandb" in config.logger else []
    return start(AGENT, [str(run.path), node_rank], words, environment, modules)


def start(
    target: str,
    arguments: Sequence[Any],
    words: Sequence[str],
    environment: dict[str, str],
    modules: Sequence[str] = (),
    streams: Sequence[int] = (0, 1, 2),
) -> Child | None:
    """Fork a process from the server of its environment; None if that server has ended.

    Call it inside `keep_servers`. `Server.fork` explains the arguments; `modules` are imported
    beforehand.
    """
    variables = import_variables(environment)
    key = json.dumps([*modules, variables], sort_keys=True)
    if key not in _servers:
        _servers[key] = _server(environment, modules, variables, words[-1])
    try:
        return _servers[key].fork(target, arguments, words, [environment], streams)[0]
    except ServerGoneError:
        del _servers[key]
        return None


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that libraries read on import."""
    return {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}


def _server(
    environment: dict[str, str], modules: Sequence[str], variables: dict[str, str], name: str
) -> Server:
    imported_with = import_variables(fork.before_imports or {})
    if fork.before_imports and variables == imported_with and threading.active_count() == 1:
        return Server.forked(name)  # a command that was itself forked
    return Server.started(environment, modules)
