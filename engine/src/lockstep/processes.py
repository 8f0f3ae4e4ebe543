"""How a process of a run starts and ends: with its parent, and without slow teardown."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from lockstep import project
from lockstep.exits import Exit
from lockstep.patches.python import run_exit_handlers

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # save, then exit
PROGRAM_VARIABLE = "LOCKSTEP_PROGRAM"  # what to type to start the run again
PR_SET_PDEATHSIG = 1  # of prctl(2)
_is_own = False  # whether this process runs nothing but our command
_exit_seconds: float | None = None  # None: exit handlers may take any time


def typed(command: str) -> str:
    """Return what to type in this folder to run a command of this installation's program."""
    ours = project.found()
    usual = project.typed(command)
    if ours is None or not usual.startswith(f"{ours.program} "):
        return usual
    installed = shutil.which(ours.program)
    if installed and Path(installed).parent == Path(sys.executable).parent:
        return usual
    program = f"{sys.executable} -m {ours.package or 'lockstep'}"
    if ours.package is not None and Path("scripts/dev.py").is_file():
        program = "python3 scripts/dev.py"
    return program + usual.removeprefix(ours.program)


def training_command() -> str:
    """Return what to type in this folder to train: the program that started this run, if one did.

    Its agent and ranks get it from the command, in their environment.
    """
    return os.environ.get(PROGRAM_VARIABLE) or typed("train")


def name_program(main: Any, name: str | None = None) -> None:
    """Note what starts this process, a script or a module, for its agents and ranks.

    Args:
        main: the module `__main__`.
        name: what to type, if the command is known.
    """
    spec = getattr(main, "__spec__", None)
    if name is not None:
        command = name
    elif spec is not None:
        is_package = Path(spec.origin or "").name == "__main__.py"
        command = f"python -m {spec.parent if is_package else spec.name}"
    elif sys.argv[0].endswith(".py"):
        command = f"python {shlex.quote(sys.argv[0])}"
    else:
        command = Path(sys.argv[0]).name
    os.environ[PROGRAM_VARIABLE] = command


@contextlib.contextmanager
def name_restored() -> Iterator[None]:
    """Let this process have its name again after a block that gives it another one."""
    argument, command = sys.argv[0], os.environ.get(PROGRAM_VARIABLE)
    try:
        yield
    finally:
        sys.argv[0] = argument
        os.environ.pop(PROGRAM_VARIABLE, None)
        if command is not None:
            os.environ[PROGRAM_VARIABLE] = command


def program_name() -> str:
    """Return what an error line begins with: the program, or the command of this installation."""
    *before, last = shlex.split(training_command())
    if last not in ("train", "prepare"):
        return Path(last).name
    ours = project.found()
    if ours is not None:
        return f"{ours.program} {last}"
    return " ".join([*(Path(word).name for word in before[-1:]), last])  # an agent has no project


def tool(name: str) -> str:
    """Return what to type in this folder to run a program of this environment, such as wandb."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) is not None or not path.is_file():
        return name
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


# Control characters except new lines, and others that cannot be seen -> how Python writes them.
CONTROLS = (*range(ord("\n")), *range(ord("\n") + 1, ord(" ")), *range(0x7F, 0xA0))
UNSEEN = (*CONTROLS, 0xA0, 0x200B, 0x2028, 0x2029, 0xFEFF)
ESCAPES = {code: repr(chr(code))[1:-1] for code in UNSEEN}


def print_error(line: str) -> None:
    """Print the line of a failed command, also for torchrun, if it has started this process.

    torchrun prints fifty lines of its own after it; the last of these then repeat it as the cause.
    Characters that a terminal would obey, such as a carriage return, are shown as escapes.
    """
    line = escaped(line)
    print(line, file=sys.stderr)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))


def escaped(text: str) -> str:
    """Return a text with escapes, such as `\\r`, for what nobody sees, except new lines."""
    return text.translate(ESCAPES)


def import_all(modules: list[str]) -> None:
    """Import `modules` with the garbage collector off, and exclude their objects from it for good.

    torch and Lightning create so many lasting objects that scanning them takes a fifth of their
    import time, and later some of the time of each step.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()


def own_process() -> None:
    """Note that this process runs nothing but our command, and ends with it."""
    global _is_own
    _is_own = True


def is_own_process() -> bool:
    """Return whether this process runs nothing but our command, so that its end is ours, too."""
    return _is_own


def freeze_lasting_objects() -> None:
    """Exclude what exists now from garbage collection, if this process is ours and a rank.

    A collection scans all of it, which stops a rank, and so all of them, for up to half a second.
    Other processes, such as a notebook's or a sweep's, go on: what they keep may become garbage.
    """
    if _is_own and "RANK" in os.environ:
        gc.collect()
        gc.freeze()


def end_process(status: int) -> NoReturn:
    """End this process as the interpreter would, but without tearing down imported modules.

    Teardown takes a second and a half in each rank. gloo would also close its connections in
    order, which takes forever if another machine has vanished silently.
    """
    if status != Exit.LOST_PEERS:
        if _exit_seconds is not None:
            end = threading.Timer(_exit_seconds, os._exit, [status])
            end.daemon = True
            end.start()
        run_exit_handlers()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # missing, broken, or closed
            stream.flush()
    os._exit(status)


def limit_exit(seconds: float) -> None:
    """Let exit handlers and remaining threads take `seconds` at most: a tracker's may hang."""
    global _exit_seconds
    _exit_seconds = seconds


def wait_for_end(children: Iterable[int], seconds: float) -> None:
    """Wait until one of these child processes ends, but at most `seconds`.

    Args:
        children: process ids whose exit status has not been read.
        seconds: the limit; without Linux 5.3, always so long.
    """
    with contextlib.ExitStack() as files:
        poll = select.poll()
        try:
            for pid in children:
                descriptor = os.pidfd_open(pid)
                files.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
        except (AttributeError, OSError):  # another system, an older kernel, or a sandbox
            time.sleep(seconds)
        else:
            poll.poll(seconds * 1000)


def end_with_parent(parent: int) -> None:
    """Kill this process when its `parent` (a process id) ends, or now if it has already ended.

    The parent passes its own id: `os.getppid()` may already be that of another process, which
    adopted this one while Python was starting.
    """
    if sys.platform == "linux":
        _let_kernel_watch(parent)
    else:
        _let_thread_watch(parent)


def _let_kernel_watch(parent: int) -> None:
    """Let the kernel kill this process at once, even while the interpreter is busy in a library."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _let_thread_watch(parent: int) -> None:
    """Check in a thread, four times a second, whether the parent still exists."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()
