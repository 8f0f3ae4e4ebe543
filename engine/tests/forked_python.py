"""A Python for tests whose processes are forks and so don't import torch and Lightning again.

    any starter --> `python` --socket--> server --fork--> the requested process

The imports of each process take four seconds of a core. `python` accepts the arguments of the real
one and represents a fork of a server. It gives the fork its arguments, environment, folder, and
open files, and passes signals on. It ends as the fork ends, and if it is killed, the fork ends too.
Processes started with `sys.executable`, by torchrun or multiprocessing, are forks as well.

The workers of pytest-xdist are forks, too, but to tests they look like processes of the real
Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

# Libraries read these while they load: a process with other values gets the real Python.
READ_ON_IMPORT = (
    "CUDA_",
    "KMP_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS",
)
PASSED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGABRT", "SIGCONT")
PACKAGE = "lockstep_gpt"
ENGINE = "lockstep"
PRELOADED = (
    "accelerate.commands.launch",
    "datasets",
    "hypothesis",
    "kubeflow_trainer_api.models",
    "kubernetes.config",
    "lockstep.commands",
    "lockstep.launch.agent",
    "lockstep.launch.agent_program",
    "lockstep.launch.composed",
    "lockstep.launch.rank_program",
    "lockstep.launch.start",
    "lockstep.callbacks.progress",
    "lockstep_gpt.train",
    "matplotlib.figure",
    "pytest",
    "torch._dynamo.backends.debugging",
    "torch._inductor.pattern_matcher",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.run",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "transformers.models.gpt2.modeling_gpt2",
    "wandb",
    "wandb.sdk.launch",
)
FLAGS = {"-B", "-u"}  # those that a fork can also have
PR_SET_PDEATHSIG = 1  # of prctl(2)
SERVER_ENDED = 70  # exit status of a `python` whose server ended (EX_SOFTWARE of sysexits.h)


def stand_for(address: str, words: list[str], worker: bool) -> NoReturn:
    """Be the process that the starter sees, pytest-xdist in case of a `worker`."""
    if not worker and not is_possible(address, words, os.environ):
        os.execv(sys.executable, [sys.executable, *words])
    signals = [getattr(signal, name) for name in PASSED]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    open_files = _open_files()
    job = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "files": open_files,
        "stands": os.getpid(),
        "worker": worker,
    }
    connection, pid = _request(address, job, open_files)
    for number in open_files:  # otherwise, they stay open after the fork closes them
        os.close(number)
    for signum in signals:
        signal.signal(signum, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        status = int.from_bytes(_received(connection), signed=True)
    except EOFError:  # the server has ended; stderr is closed
        status = SERVER_ENDED
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _request(
    address: str, job: Mapping[str, Any], open_files: Sequence[int]
) -> tuple[socket.socket, int]:
    """Ask a server for a process; return the connection that tells its end, and its id."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    text = json.dumps(job).encode()
    socket.send_fds(connection, [len(text).to_bytes(8)], open_files)
    connection.sendall(text)
    return connection, int.from_bytes(_received(connection))


class Fork:
    """A fork that this process asked a server for, with the methods of `Popen` that tests use.

    Unlike a process that `python` represents, it has the id that `pid` tells.
    """

    def __init__(
        self,
        address: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        streams: Sequence[int],
    ) -> None:
        job = {
            "words": [*words],
            "environment": {**environment},
            "folder": folder,
            "files": [*range(len(streams))],
            "parent": os.getpid(),
            "worker": False,
        }
        self._connection, self.pid = _request(address, job, streams)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, -n after signal n; None while the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; return its exit status.

        Raises:
            TimeoutExpired: it has not ended after `timeout` seconds.
        """
        if (status := self._look(timeout)) is None:
            import subprocess  # slow, and of no use to `python`

            raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout or 0)
        return status

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            with self._connection:
                self.returncode = int.from_bytes(_received(self._connection), signed=True)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def is_possible(address: str, words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a fork can be the process of `python WORDS` in an environment."""
    with open(f"{address}.json") as file:  # noqa: PTH123 (pathlib is slow to import)
        served = json.load(file)
    return _mattering(environment) == _mattering(served) and _can_be(words)


def _mattering(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(READ_ON_IMPORT)}


def _can_be(words: Sequence[str]) -> bool:
    first = next((word for word in words if word not in FLAGS), "-")
    return first in ("-c", "-m") or not first.startswith("-")


def _open_files() -> list[int]:
    descriptors = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # of the listing itself
            os.fstat(number)
            descriptors.append(number)
    return descriptors


def _received(connection: socket.socket, size: int = 8) -> bytes:
    content = b""
    while len(content) < size:
        if not (part := connection.recv(size - len(content))):
            raise EOFError
        content += part
    return content


def serve(listener: socket.socket, program: str, modules: Sequence[str] = ()) -> NoReturn:  # noqa: C901
    """Fork on request until the last client that keeps this server has gone.

    Args:
        listener: accepts requests.
        program: the `python` of the forks.
        modules: imported before forking; if empty, the imports of commands and ranks.
    """
    import selectors

    _load(modules)
    keepers: set[socket.socket] = set()
    selector = selectors.DefaultSelector()

    def accept() -> None:
        connection, _ = listener.accept()
        files: list[int] = []
        try:
            header, files, _, _ = socket.recv_fds(connection, 8, 253)
            content = _received(connection, int.from_bytes(header))
        except (EOFError, OSError):  # the requester was killed meanwhile
            header = b""
        if len(header) < 8:
            for number in files:
                os.close(number)
            connection.close()
            return
        if not content:
            keepers.add(connection)
            selector.register(connection, selectors.EVENT_READ, lambda: leave(connection))
            return
        job = json.loads(content)
        if not (pid := os.fork()):
            connection.close()
            listener.close()
            selector.close()
            _be(job, files, program)
        for number in files:
            os.close(number)
        ended = os.pidfd_open(pid)

        def reap() -> None:
            selector.unregister(ended)
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            os.close(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(8, signed=True))
            connection.close()

        def kill() -> None:  # its `python` was killed
            selector.unregister(connection)
            os.kill(pid, signal.SIGKILL)

        selector.register(ended, selectors.EVENT_READ, reap)
        selector.register(connection, selectors.EVENT_READ, kill)
        with contextlib.suppress(OSError):
            connection.sendall(pid.to_bytes(8))

    def leave(connection: socket.socket) -> None:
        selector.unregister(connection)
        connection.close()
        keepers.remove(connection)
        if not keepers:
            os._exit(0)

    selector.register(listener, selectors.EVENT_READ, accept)
    while True:
        for key, _ in selector.select():
            if key in selector.get_map().values():  # an earlier event has not ended it
                key.data()


def _load(modules: Sequence[str]) -> None:
    """Import what the forks need; their collector leaves it alone."""
    import gc
    import importlib

    # Make torch count GPUs through NVML: an initialized driver does not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gc.disable()
    for module in modules or PRELOADED:
        with contextlib.suppress(ImportError):  # a project may do without
            importlib.import_module(module)
    if not modules:
        _compose_once()
        _leave_plugins()
    gc.enable()
    gc.freeze()


def _compose_once() -> None:
    """Compose quickly, as tests in their own process do, and what most commands compose once."""
    import composition  # from this file's folder

    from lockstep import commands as cli

    stack = contextlib.ExitStack()
    stack.enter_context(composition.quick())
    vars(composition)["stack"] = stack  # without a reference to it, this would be undone
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # noqa: PTH123
        cli.main(["train", "experiment=smoke", "--cfg", "job"])


def _leave_plugins() -> None:
    """Tell pytest not to rewrite its imported plugins, as it would warn that it cannot."""
    from importlib.metadata import entry_points

    for point in entry_points(group="pytest11"):
        for name in {file.parts[0].removesuffix(".py") for file in point.dist.files}:
            if name in sys.modules:
                sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"


def _be(job: dict[str, Any], files: list[int], program: str) -> NoReturn:
    """Be the requested process until its end."""
    import atexit
    import threading

    status: object = 1
    try:
        run = _settle_in(job, files, sys.executable if job["worker"] else program)
        run()
        status = 0
    except SystemExit as error:
        status = error.code
        if status is None:
            status = 0
        elif not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(int(status) & 0xFF)


def _parent_of(job: Mapping[str, Any]) -> Callable[[], int]:
    """Return an `os.getppid` for this process: the parent of its `python`, or who asked for it."""
    from pathlib import Path

    ours, real = os.getpid(), os.getppid

    def getppid() -> int:
        if os.getpid() != ours:  # one of our forks
            return real()
        if "parent" in job:  # we end with it
            return int(job["parent"])
        try:
            stat = Path(f"/proc/{job['stands']}/stat").read_text()
        except FileNotFoundError:  # it has ended, as we are about to
            return 1
        return int(stat.rpartition(")")[2].split()[1])

    return getppid


def _join_namespaces(pid: int) -> None:
    """Enter the network, the mounts, and the host name of a process, as its child would have."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        with contextlib.suppress(FileNotFoundError):  # it has ended, as we are about to
            theirs = os.stat(f"/proc/{pid}/ns/{kind}")  # noqa: PTH116
            if theirs.st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:  # noqa: PTH116
                continue
            with open(f"/proc/{pid}/ns/{kind}") as namespace:  # noqa: PTH123
                if libc.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {pid}")


def _settle_in(job: dict[str, Any], files: list[int], program: str) -> Callable[[], object]:  # noqa: C901
    """Set up the state of a separate program; return a function that runs it."""
    import atexit
    import ctypes
    import fcntl
    import importlib
    import multiprocessing.spawn
    import multiprocessing.util
    import runpy
    import types
    import warnings
    import weakref
    from pathlib import Path

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if "stands" in job:
        _join_namespaces(job["stands"])
    held = {number: fcntl.fcntl(number, fcntl.F_DUPFD, 500) for number in files}
    for number in (0, 1, 2, *files):
        with contextlib.suppress(OSError):
            os.close(number)
    for wanted, number in zip(job["files"], held.values(), strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.getppid = _parent_of(job)
    if processes := sys.modules.get(f"{ENGINE}.processes"):  # the kernel would watch the server
        vars(processes)["_let_kernel_watch"] = processes._let_thread_watch
    sys.executable = program
    multiprocessing.spawn.set_executable(program)
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    words = list(job["words"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    while words[0] in FLAGS:
        if words.pop(0) == "-B":
            sys.dont_write_bytecode = True
            continue
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    theirs = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    rest = [path for path in sys.path[1:] if path not in theirs]  # the first was this file's folder
    if any(Path(path, name).is_dir() for path in theirs for name in (PACKAGE, ENGINE)):  # others
        for name in [name for name in sys.modules if name.split(".")[0] in (PACKAGE, ENGINE)]:
            del sys.modules[name]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.path[:] = [job["folder"], *theirs, *rest]
        sys.argv = ["-m", *words[2:]]
        warnings.filterwarnings("ignore", ".* found in sys.modules after import of package")
        return lambda: runpy._run_module_as_main(words[1])
    if words[0] == "-c":
        sys.path[:] = ["", *theirs, *rest]
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.path[:] = [str(Path(words[0]).resolve().parent), *theirs, *rest]
        sys.argv = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    return lambda: exec(code, vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4:])
    stand_for(sys.argv[2], sys.argv[3:], sys.argv[1] == "worker")
