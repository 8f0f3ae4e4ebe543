"""Fork on request: how a server works, and how a new process sets itself up.

    requester --socket--> server --fork--> process in between --fork--> the new process

The process in between ends at once. Linux gives its orphan to the nearest ancestor that is a
subreaper, and that is the requester. So the new process is the requester's child, which it can
wait for and send signals to as if it had started the process itself.

A server has one thread, and touches neither CUDA nor autograd, which do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep_gpt import processes
from lockstep_gpt.python_patches import forget_exit_handlers

PR_SET_NAME = 15  # of prctl(2)
LONGEST_NAME = 15  # bytes that the kernel keeps
GO = b"!"  # tells a new process that its requester knows of it

ignores_hangup = False  # as under `nohup`
# Environment before the imports, of this process or of the one that it was forked from.
before_imports: dict[str, str] | None = None


@dataclass(frozen=True)
class Job:
    """What new processes run, one in each of `environments`.

    Args:
        target: a function, as `module:name`, that returns an exit status.
        arguments: arguments of the function.
        words: what follows `python -m` in the command line that `ps` shows.
        environments: environments of the processes.
        folder: their working directory.
        requester: the process that becomes their parent.
    """

    target: str
    arguments: list[Any]
    words: list[str]
    environments: list[dict[str, str]]
    folder: str
    requester: int


def libc() -> ctypes.CDLL:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)


def receive(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes.

    Raises:
        ConnectionResetError: the other end closed before they arrived.
    """
    content = bytearray()
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionResetError("the other end has closed")
        content += part
    return bytes(content)


def serve(connection: socket.socket) -> NoReturn:
    """Fork on request until the other end closes; new processes never return from here either."""
    global ignores_hangup
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for signum in processes.STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    while True:
        try:
            header, descriptors, _, _ = socket.recv_fds(connection, 8, 4)
            if not header:
                processes.end_process(0)
            size = int.from_bytes(header + receive(connection, 8 - len(header)))
            job = Job(**json.loads(receive(connection, size)))
            pids = json.dumps(_fork(job, descriptors, connection)).encode()
            connection.sendall(len(pids).to_bytes(8) + pids)
        except OSError:  # the requester has ended
            processes.end_process(1)
        for descriptor in descriptors:
            os.close(descriptor)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; a thread would hinder forks."""
    libc().prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _fork(job: Job, descriptors: list[int], connection: socket.socket) -> list[int]:
    """Fork a process that forks the processes of `job` and ends; return their ids."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            for number, environment in enumerate(job.environments):
                if os.fork() == 0:
                    os.setsid()  # before its requester can send a signal to its group
                    os.write(write, f"{number}:{os.getpid()} ".encode())
                    os.close(read)
                    os.close(write)
                    connection.close()
                    _run_process(job, environment, descriptors)
        finally:  # only new processes may continue from here
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        numbered_pids = [word.split(b":") for word in file.read().split()]
    pids = {int(number): int(pid) for number, pid in numbered_pids}
    os.waitpid(between, 0)  # from here on they are the requester's children
    return [pids[number] for number in sorted(pids)]


def _run_process(job: Job, environment: Mapping[str, str], descriptors: list[int]) -> NoReturn:
    """Run one process of `job` to its end: first set it up as a program's start would."""
    status = 1
    try:
        handlers: dict[int, Any] = dict.fromkeys(processes.STOP_SIGNALS, signal.SIG_DFL)
        handlers[signal.SIGINT] = signal.default_int_handler  # as when Python starts
        if ignores_hangup:
            handlers[signal.SIGHUP] = signal.SIG_IGN
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        *streams, wait = descriptors
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        go = os.read(wait, 1)
        for descriptor in {*descriptors} - {0, 1, 2}:
            os.close(descriptor)
        if go != GO:
            os._exit(1)
        end_with(job.requester)
        _set_up_process(job, environment)
        module, _, name = job.target.partition(":")
        status = getattr(importlib.import_module(module), name)(*job.arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    processes.end_process(status)


def _set_up_process(job: Job, environment: Mapping[str, str]) -> None:
    """Set up what a separate program would have: folder, environment, arguments, random seed."""
    before = str(Path("/proc/self/cwd").readlink()).removesuffix(" (deleted)")
    os.chdir(job.folder)
    ours = before_imports or {}
    set_by_imports = {name: text for name, text in os.environ.items() if name not in ours}
    os.environ.clear()
    os.environ.update({**set_by_imports, **environment})
    theirs = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    rest = [path for path in sys.path if path != before and path not in theirs]
    sys.path[:] = [job.folder, *theirs, *rest]
    importlib.invalidate_caches()
    sys.argv = [*job.words]
    forget_exit_handlers()
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed()  # else ranks draw the same numbers; `random` reseeds itself
    show_command_line(job.words)


def show_command_line(words: Sequence[str] = ()) -> None:
    """Make `ps` show another command line after a short name, such as `rank 3`.

    Without setproctitle, only the name changes. The first call finds the command line in memory
    with the help of the environment that the process was started with, so call it before any change
    to the environment.
    """
    if words:
        libc().prctl(PR_SET_NAME, name_of(words).encode()[:LONGEST_NAME], 0, 0, 0)
    with contextlib.suppress(ImportError):
        import setproctitle

        line = setproctitle.getproctitle()
        if words:
            line = f"{name_of(words)}: {' '.join(['python -m', *words])}"
        setproctitle.setproctitle(line)


def name_of(words: Sequence[str]) -> str:
    """Return a short name of the process that runs `python -m WORDS`."""
    role = words[0].rpartition(".")[-1].partition("_")[0]  # of `rank_program`, for example
    return f"{role} {os.environ['RANK']}" if role == "rank" else role
