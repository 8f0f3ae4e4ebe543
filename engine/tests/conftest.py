"""Shared by all tests: the real command, and one finished run of it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import itertools
import json
import logging
import math
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings
from lockstep_gpt import CONFIGS

from lockstep import configs, processes
from lockstep.launch import supervise

if os.environ.get("ENDS_WITH_PARENT"):  # tests of a project that other tests generated
    processes.end_with_parent(os.getppid())
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests send it, and children inherit nohup's
# The default limit of 200 ms per example fails on a busy machine.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Tests run in parallel: threads that wait for each other would wait for other tests' threads.
# And no test may find the user's account.
QUIET = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
# Two of the README's commands, whose output many tests check.
FIRST = "train experiment=smoke run_dir=runs/first"
ON_TWO_RANKS = (
    "train experiment=smoke trainer=cpu trainer.devices=2 strategy=ddp "
    "strategy.process_group_backend=gloo"
)
COMMAND = "lockstep.commands:main"
FOLDERS = (CONFIGS, Path(configs.__file__).parent)  # of choices
FORKS = Path(__file__).with_name("forked_python.py")
STAND_IN = [sys.executable, "-ISE", str(FORKS)]
TIMEOUT = 240  # seconds; on an idle machine, no command takes an eighth of it
PLUGINS = (
    "composition",
    "gradients",
    "local_tasks",
    "miniature",
    "mounts_and_pages",
)  # files of fixtures for all tests
# Python's defaults: a command in this process should warn like one in a separate process.
USUAL_FILTERS = (
    ("ignore", ResourceWarning),
    ("ignore", ImportWarning),
    ("ignore", PendingDeprecationWarning),
    ("ignore", DeprecationWarning),
)


def _load(path: Path) -> Any:
    """Import a file next to this one; pytest's importlib mode has no folder for such imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


forked_python = _load(FORKS)
GPU_REPORT = Path(__file__).parents[2] / "runs/gpu_report.txt"
# Settings of runs whose ranks are separate processes, one rank or more.
RANKS = ("trainer", "strategy", "launch.", "guard.stall_after")


@dataclass
class Command:
    """Runs `lockstep-gpt` for real, in its own folder, on data that all tests share.

    A call runs the command to its end in this process; agents and ranks are separate processes.
    `start` also runs the command in a separate process, for tests that signal or kill it.
    """

    folder: Path
    data_root: Path
    forks: str  # a `python` whose processes are forks
    python: str | None = None  # starts agents and ranks; None: the real Python
    _started: list[tuple[Any, list[IO[Any]]]] = field(default_factory=list, init=False)

    def elsewhere(self, folder: Path) -> Command:
        """Return the same command in another folder."""
        return replace(self, folder=folder)

    def end(self) -> None:
        """Kill the processes that a failed test left running, and close all files of output."""
        for process, printed in self._started:
            process.kill()  # without effect on a process that has ended
            process.wait()
            for file in printed:
                file.close()

    def start(self, *arguments: str, target: str = COMMAND, **environment: str) -> Started:
        """Start the command and return its process, forked from one that imported everything.

        Args:
            arguments: the command's arguments.
            target: a function to call with them instead, `module:function`.
            environment: environment variables of the process.
        """
        module, _, function = target.partition(":")
        lines = (
            f"import sys, lockstep_gpt, {module} as module",
            f"sys.executable = {self.python or sys.executable!r}",  # for its own processes
            f"sys.exit(module.{function}(sys.argv[1:]))",
        )
        return self.start_python("-c", "\n".join(lines), *arguments, **environment)

    def start_python(self, *words: str, **environment: str) -> Started:
        """Start `python WORDS`, forked from a process that imported everything."""
        clean = {**_clean_environment(os.environ), **QUIET, **environment}
        address = str(Path(self.forks).with_name("socket"))
        if sys.platform != "linux" or not forked_python.is_possible(address, words, clean):
            return Started(self.start_words([sys.executable, *words], **environment))
        printed = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed by `end`)
        streams = [0, *(file.fileno() for file in printed)]
        process = forked_python.Fork(address, words, clean, str(self.folder), streams)
        self._started.append((process, printed))
        return Started(process, *printed)

    def start_words(self, words: list[str], **environment: str) -> subprocess.Popen[str]:
        """Start any program."""
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env={**_clean_environment(os.environ), **QUIET, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append((process, [process.stdout, process.stderr]))
        return process

    def __call__(
        self, *arguments: str, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end and check its exit status."""
        actual_status, out, err = self.run(*arguments, **environment)
        assert actual_status == status, f"{arguments}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, status, out, err)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Run the command to its end; return its exit status and what it printed."""
        with _as_process(self.folder, environment, self.python) as streams:
            status = _main(arguments)
        out, err = streams
        return status, out, err

    def run_words(self, words: list[str]) -> tuple[int, str, str]:
        """Run any program to its end; return its exit status and what it printed."""
        process = self.start_words(words)
        out, err = _to_the_end(process)
        return process.returncode, out, err

    def train(
        self, *overrides: str, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the smoke experiment with `overrides`; in this process if one rank is enough."""
        ranks = any(override.startswith(RANKS) for override in overrides)
        inline = [] if ranks else ["launch.inline=true"]
        return self(*self.smoke(*inline, *overrides), status=status, **environment)

    def smoke(self, *overrides: str) -> list[str]:
        """Return the arguments of the smoke experiment's command on the shared data."""
        base = ["train", "experiment=smoke"]
        data = [
            override.partition("=")[2] for override in overrides if override.startswith("data=")
        ]
        if all(any((each / f"data/{name}.yaml").is_file() for each in FOLDERS) for name in data):
            # not of one's own
            base.append(f"data.root={self.data_root}")
        if not any(override.startswith(("logger=", "hydra/")) for override in overrides):
            base.append("logger=none")
        if not any(override.startswith(("callbacks=", "~callbacks")) for override in overrides):
            base.append("callbacks.sample.length=9")  # 300 take a quarter of the time
        return [*base, *overrides]

    def summary(self, run: str) -> dict[str, Any]:
        """Return a run's summary.json."""
        return dict(json.loads((self.folder / run / "summary.json").read_text()))


class Started:
    """A process of the command, a new program or a fork, with the methods that tests use."""

    def __init__(self, process: Any, *files: IO[bytes]) -> None:
        self._process = process
        self._files = files
        self._printed: list[str] = []  # the files' content, once they are closed
        self.pid: int = process.pid
        self.send_signal, self.kill, self.poll = process.send_signal, process.kill, process.poll

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    @property
    def returncode(self) -> int | None:
        """The exit status, -n after signal n; None if not known yet."""
        status: int | None = self._process.returncode
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was printed, out and err."""
        if not self._files:
            out, err = self._process.communicate(timeout=timeout)
            return out, err
        self._process.wait(timeout)
        for file in self._files[len(self._printed) :]:
            file.seek(0)
            self._printed.append(file.read().decode(errors="replace"))
            file.close()
        return self._printed[0], self._printed[1]


def _main(arguments: Sequence[str]) -> int:
    """Run the command in this process; return the exit status that it would have had."""
    from lockstep import commands as cli

    try:
        return cli.main(arguments)
    except SystemExit as error:  # from argparse
        return error.code if isinstance(error.code, int) else 1
    except Exception:  # an uncaught exception ends a process like this
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def _as_process(
    folder: Path, environment: dict[str, str], python: str | None
) -> Iterator[list[str]]:
    """Run a block with the folder, environment, streams, and filters of a separate process.

    Yields:
        a list that is empty until the end, and then contains the output, out and err.
    """
    printed: list[str] = []
    modules = set(sys.modules)
    before = dict(os.environ), Path.cwd(), sys.path[:], sys.argv[:], sys.executable
    theirs = environment.get("PYTHONPATH", "").split(os.pathsep)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _descriptors(out, err), warnings.catch_warnings():
            warnings.resetwarnings()
            for action, category in USUAL_FILTERS:
                warnings.simplefilter(action, category)
            try:
                os.chdir(folder)
                os.environ.clear()
                os.environ.update({**_clean_environment(before[0]), **QUIET, **environment})
                sys.path[:] = [str(folder), *filter(None, theirs), *sys.path]
                sys.executable = python or sys.executable
                yield printed
            finally:
                os.environ.clear()
                os.environ.update(before[0])
                os.chdir(before[1])
                sys.path[:], sys.argv[:], sys.executable = before[2:]
                for name in {*sys.modules} - modules:  # from the test's folder, not from libraries
                    if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                        del sys.modules[name]
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))


@contextlib.contextmanager
def _descriptors(*files: IO[bytes]) -> Iterator[None]:
    """Redirect the output of this process and its children to `files`."""
    streams = sys.stdout, sys.stderr
    descriptors = [os.dup(number) for number in (1, 2)]
    try:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (
            os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8") for number in (1, 2)
        )
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
        sys.stdout, sys.stderr = streams
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _to_the_end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a process and return its output; kill it if it takes too long."""
    try:
        return process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not ended after {TIMEOUT} s\n{out}\n{err}")


def _clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of pytest-xdist, a launcher, or wandb."""
    names = (
        "PYTEST_",
        "PYTHONDONTWRITEBYTECODE",
        "RANK",
        "LOCAL_",
        "WORLD_SIZE",
        "MASTER_",
        "OMP_NUM_THREADS",
        "WANDB_",
    )
    return {name: value for name, value in environment.items() if not name.startswith(names)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
    # Each worker of pytest-xdist starts with a section of all tests. Files with slow tests begin
    # it; otherwise, one of them would run alone at the end.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    first = [item for item in items if item.path in slow]
    files = [list(of_file) for _, of_file in itertools.groupby(first, lambda item: item.path)]
    rest = iter([item for item in items if item.path not in slow])
    left = len(items)
    items.clear()
    for number in range(workers):
        size = left // (workers - number)
        left -= size
        lead = list(itertools.chain.from_iterable(files[number::workers]))
        items += [*lead, *itertools.islice(rest, max(0, size - len(lead)))]
    items += rest


def pytest_runtest_setup() -> None:
    """Begin each test with Python's own level of logs: some of what tests call changes it."""
    logging.getLogger().setLevel(logging.WARNING)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Make the fixtures of other files known to all tests.

    The controller of pytest-xdist runs no test, so it does without the imports of tests.
    """
    plugins = session.config.pluginmanager
    if plugins.hasplugin("dsession"):
        return
    for name in PLUGINS:
        plugins.register(_load(Path(__file__).with_name(f"{name}.py")))


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Make the workers forks of the server of `python_of_forks`: one process imports for all."""
    if sys.platform != "linux":
        return
    forks = contextlib.ExitStack()
    config.add_cleanup(forks.close)
    folder = config._tmp_path_factory.getbasetemp() / "python"  # where its fixture looks, too
    forks.enter_context(_forks_of(folder, ()))
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([*STAND_IN, "worker", f"{folder}/socket"])


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run tests of tiny tensors on one thread; a second core may be busy with other work.

    So do the processes that tests start; `forked_python.py` has forks only for these.
    """
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", QUIET["OMP_NUM_THREADS"])
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    """Exclude imported modules from garbage collection, which each run calls."""
    importlib.import_module("lockstep_gpt.train")
    gc.collect()
    gc.freeze()


@pytest.fixture
def thawed() -> Iterator[None]:
    """Let garbage collection see all objects during a test."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def state(shared: Path) -> Iterator[None]:
    """Keep tests from recording anything in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(shared / "state"))
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield


@pytest.fixture(scope="session")
def forks_of(shared: Path) -> Iterator[Callable[..., str]]:
    """Return a function that creates a named `python`, whose processes are forks with modules.

    On other systems than Linux, it is the real Python.
    """
    with contextlib.ExitStack() as servers:

        def make(name: str, *modules: str) -> str:
            if sys.platform != "linux":
                return sys.executable
            return str(servers.enter_context(_forks_of(shared / name, modules)))

        yield make


@pytest.fixture(scope="session")
def python_of_forks(forks_of: Callable[..., str]) -> str:
    """A `python` whose processes are forks with the imports of commands and ranks."""
    return forks_of("python")


@pytest.fixture
def quick_ranks(python_of_forks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command start its processes as usual, but with a Python that forks them."""
    monkeypatch.setattr(sys, "executable", python_of_forks)


@contextlib.contextmanager
def _forks_of(folder: Path, modules: Sequence[str]) -> Iterator[Path]:
    """Create a `python` in `folder`; all workers of pytest-xdist share it and its server."""
    folder.mkdir(exist_ok=True)
    program, address = folder / "python", folder / "socket"
    server = None
    with socket.socket(socket.AF_UNIX) as keeper:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                keeper.connect(str(address))
            except OSError:  # no server yet, or its users have gone
                address.unlink(missing_ok=True)
                server = _serve(program, address, modules)
                keeper.connect(str(address))
            keeper.sendall(bytes(8))  # the server ends with its last such client
        yield program
    if server:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=1)
        server.returncode = 0  # others may still use it, so Python must not warn


def _serve(program: Path, address: Path, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    program.write_text(f'#!/bin/sh\nexec {shlex.join(STAND_IN)} as {address} "$@"\n')
    program.chmod(0o755)
    environment = {**supervise.KEEP_MEMORY, **_clean_environment(os.environ), **QUIET}
    address.with_name(f"{address.name}.json").write_text(json.dumps(environment))
    with socket.socket(socket.AF_UNIX) as listener, address.with_suffix(".log").open("w") as log:
        listener.bind(str(address))
        listener.listen(1024)
        return subprocess.Popen(
            [sys.executable, FORKS, "serve", str(listener.fileno()), program, *modules],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


@pytest.fixture(scope="session")
def data_root(shared: Path) -> Path:
    return shared / "data"


@pytest.fixture
def command(tmp_path: Path, data_root: Path, python_of_forks: str) -> Iterator[Command]:
    """The command; its agents and ranks are forks."""
    command = Command(tmp_path, data_root, python_of_forks, python_of_forks)
    yield command
    command.end()


@pytest.fixture(scope="session")
def finished(shared: Path, data_root: Path, python_of_forks: str) -> tuple[Command, str]:
    """A finished run of the smoke experiment in `runs/first`, and its output."""
    folder = shared / "finished"
    command = Command(folder, data_root, python_of_forks, python_of_forks)
    return _once(command, FIRST.split(), "first")


@pytest.fixture(scope="session")
def two(finished: tuple[Command, str]) -> tuple[Command, str]:
    """The same on two ranks, in `runs/two` next to it."""
    return _once(finished[0], [*ON_TWO_RANKS.split(), "run_dir=runs/two"], "two")


def _once(command: Command, words: list[str], name: str) -> tuple[Command, str]:
    """Run a command in one worker of pytest-xdist; the others read its output."""
    command.folder.mkdir(exist_ok=True)
    screen = command.folder.with_name(f"{name}.screen")
    with screen.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not screen.exists():
            screen.write_text(command(*words, f"data.root={command.data_root}").stdout)
    return command, screen.read_text()


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Refuse, as a full disk does, to write more than the first 4,000 bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def check_two_ranks_start_like_one(command: Command) -> Callable[[Path], None]:
    """Train weights of bytes further on one rank and on two, and compare the losses."""

    def check(source: Path) -> None:
        words = [f"init_from={source}", "max_steps=7", "precision=64-true"]
        command.train(*words, "run_dir=runs/one")
        ranks = ["trainer=cpu", "trainer.devices=2", "strategy=ddp"]
        command.train(*words, *ranks, "run_dir=runs/two")
        one = command.summary("runs/one")["val_loss"]
        two = command.summary("runs/two")["val_loss"]
        assert one == pytest.approx(two, abs=1e-10)
        assert one != pytest.approx(math.log(256), abs=0.1)  # as with random weights

    return check


@pytest.fixture(scope="session")
def commands_of_fixtures() -> set[str]:
    """The README's commands that fixtures run."""
    return {FIRST, ON_TWO_RANKS}


@pytest.fixture
def wait_for() -> Callable[[Callable[[], Any]], Any]:
    """Wait until a condition is true and return its value; fail after three minutes."""

    def wait(
        condition: Callable[[], Any],
        seconds: float = 180,
        poll: float = 0.05,
        describe: Callable[[], str] = lambda: "",
    ) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited too long\n{describe()}"
            time.sleep(poll)
        return value

    return wait


@pytest.fixture
def wait_for_checkpoint(wait_for: Callable[..., Any]) -> Callable[[Path], Any]:
    """Wait until a run has saved any checkpoint; each is soon deleted for a newer one."""
    return lambda run: wait_for(lambda: any(run.glob("checkpoints/step=*.ckpt")))


@pytest.fixture
def processes_of() -> Callable[[Path], list[int]]:
    """Return the ids of all live processes whose command line contains a path, the newest last."""

    def find(path: Path) -> list[int]:
        started = {}  # ids of processes begin again at 1 after the largest
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes()
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(path).encode() in line and stat[0] != "Z":
                started[int(entry.name)] = int(stat[19])  # `starttime` of proc(5)
        return sorted(started, key=lambda pid: (started[pid], pid))

    return find


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Return whether a process exists and has not ended."""

    def is_running(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    return is_running


@pytest.fixture
def kill() -> Callable[[int], None]:
    """Send SIGKILL to one process that a test started."""
    return lambda pid: os.kill(pid, signal.SIGKILL)


def pytest_xdist_auto_num_workers() -> int:
    """Use one more worker than there are cores: tests of limits and links mostly wait."""
    return (os.cpu_count() or 1) + 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once in CI, so that a canceled run shows the cause."""
    if report.failed and os.environ.get("CI") and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}: {report.when} failed\n{report.longreprtext}", flush=True)
    ran = report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ
    if "gpu" in report.keywords and ran and not report.skipped:
        facts = "".join(f"; {name}: {value}" for name, value in report.user_properties)
        name = report.nodeid.rpartition("::")[2]
        GPU_REPORT.parent.mkdir(exist_ok=True)
        with GPU_REPORT.open("a") as file:
            file.write(f"{report.outcome:<6} {report.duration:6.1f} s  {name}{facts}\n")
