"""The machine below a run: its devices, found without torch, and the processes of a run on it.

Agents and ranks start as `python -m lockstep_gpt.machine agent|rank RUN_DIR`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep_gpt.config import PROGRAM, Config, UserError, is_module
from lockstep_gpt.run_directory import RunDirectory

DEVICE_FILES = Path("/dev")
SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface
MODULES = {
    "agent": "lockstep_gpt.agent",
    "rank": "lockstep_gpt.training.train",
}
LOST_PEERS = 75  # exit status of a rank under which others vanished (EX_TEMPFAIL of sysexits.h)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Of glibc: else each step maps its large tensors anew, and the system clears their pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True)
class Placement:
    """The ranks of a run: `devices` on each of `nodes` machines, one rank a device."""

    accelerator: str  # cpu or cuda
    devices: int
    nodes: int


def place(config: Config) -> Placement:
    """Resolve `auto` to what is there.

    Raises:
        UserError: devices are asked for that are not there, or cannot do what is asked of them.
    """
    accelerator = _accelerator(config.trainer.get("accelerator", "auto"))
    found = gpu_count() if accelerator == "cuda" else None  # of CPU ranks there is no end
    devices, nodes = config.trainer.get("devices", "auto"), config.trainer.get("num_nodes", 1)
    if is_inside_launcher():
        devices, nodes = _as_launched(devices, nodes)
    elif devices == "auto":
        devices = found or 1
    if found is not None and devices > found:
        raise UserError(f"trainer.devices={devices} is more than there are: {_visible(found)}")
    placement = Placement(accelerator, devices, nodes)
    _refuse_impossible(config, placement)
    return placement


def is_inside_launcher() -> bool:
    """Tell whether a launcher, torchrun for one, has given this process its rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _as_launched(devices: int | str, nodes: int) -> tuple[int, int]:
    """Take the ranks that an outer launcher has started; what was asked for must agree."""
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    launched = world_size // local_world_size
    if devices not in ("auto", local_world_size):
        raise UserError(
            f"trainer.devices={devices} but the launcher started {local_world_size} ranks on this "
            f"machine; drop the setting, or start {devices}"
        )
    if nodes not in (1, launched):
        raise UserError(
            f"trainer.num_nodes={nodes} but the launcher started {launched}; drop the setting"
        )
    return local_world_size, launched


def _accelerator(asked: str) -> str:
    if asked == "cpu":
        return "cpu"
    if gpu_count():
        return "cuda"
    if asked == "auto":
        return "cpu"
    raise UserError(f"trainer.accelerator={asked} but {_visible(0)}; trainer=cpu runs without")


def gpu_count() -> int:
    """Count the NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in DEVICE_FILES.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    if not present and (command := shutil.which("nvidia-smi")):  # WSL has no device files
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
        present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    return len(names[: names.index("-1")] if "-1" in names else list(filter(None, names)))


def _visible(count: int) -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    note = "" if mask is None else f" with CUDA_VISIBLE_DEVICES={mask}"
    return f"{count or 'no'} GPU{'' if count == 1 else 's'} visible{note}"


def _refuse_impossible(config: Config, placement: Placement) -> None:
    if config.precision == "16-mixed" and placement.accelerator != "cuda":
        raise UserError(
            f"precision=16-mixed needs a GPU, this run takes {placement.accelerator}; "
            "set precision=bf16-mixed or 32-true"
        )
    if is_inside_launcher() and config.strategy.get("start_method") == "spawn":
        raise UserError(
            "strategy=ddp_spawn starts its own ranks and cannot run inside a launcher; "
            "set strategy=ddp"
        )
    backend, hook = (config.strategy.get(name) for name in ("process_group_backend", "comm_hook"))
    if backend == "nccl" and placement.accelerator != "cuda":
        raise UserError(
            f"strategy.process_group_backend=nccl needs GPUs, this run takes "
            f"{placement.accelerator}; set strategy.process_group_backend=gloo"
        )
    if hook == "bf16" and (placement.accelerator != "cuda" or backend not in (None, "nccl")):
        raise UserError(
            "strategy.comm_hook=bf16 needs GPUs and NCCL; set strategy.comm_hook=fp16 or none"
        )
    warm = _warm()
    if config.launch.warm and not (warm and warm.is_possible(config)):
        raise UserError(
            "launch.warm=true needs Linux, the extra `warm`, and another strategy than ddp_spawn; "
            "leave it out, or set false"
        )


def own_address(endpoint: str) -> tuple[str, str]:
    """Return this machine's address as seen from `endpoint`, HOST:PORT, and its interface.

    Raises:
        UserError: the endpoint is no address, has no name here, or only this machine sees it.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((host, int(port)))
            address = str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UserError(
            f"launch.rdzv_endpoint={endpoint} cannot be reached ({error}); give HOST:PORT of "
            "machine 0, as this one can resolve it"
        ) from None
    if address.startswith("127."):
        raise UserError(
            f"launch.rdzv_endpoint={endpoint} is the loopback, which no other machine reaches; "
            "give an address of machine 0's network"
        )
    return address, next(filter(lambda name: _has(name, address), _interfaces()), "")


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _has(interface: str, address: str) -> bool:
    import fcntl

    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:  # it has no address
            return False
    return socket.inet_ntoa(answer[20:24]) == address


def command(role: str, run: RunDirectory, node_rank: int = 0) -> list[str]:
    """Return the command that starts an `agent` or a `rank` of `run` on this machine."""
    words = [sys.executable, "-m", "lockstep_gpt.machine", role, str(run.path)]
    return [*words, str(node_rank)] if node_rank else words


def invocation() -> str:
    """Return what to type here to reach this very installation's command."""
    if (found := shutil.which(PROGRAM)) and Path(found).parent == Path(sys.executable).parent:
        return PROGRAM
    if Path("scripts/dev.py").is_file():
        return "python3 scripts/dev.py"
    return f"{sys.executable} -m lockstep_gpt"


def supervise(run: RunDirectory, node_rank: int = 0) -> int:
    """Start the ranks' agent, pass our signals on to it, and return the run's exit status."""
    passed: list[int] = []
    agent: Any = None  # of `subprocess.Popen`'s kind

    def forward(signum: int, _frame: FrameType | None) -> None:
        impatient = signum == signal.SIGINT and signal.SIGINT in passed
        passed.append(signum)
        if agent is None:  # there is nobody yet that it could be passed on to
            raise KeyboardInterrupt
        agent.send_signal(signal.SIGKILL if impatient else signum)

    before = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    try:
        with sharing_servers():  # while it may be needed, for it has made what its forks share
            agent = _start_agent(run, node_rank)
            status: int = agent.wait()
    except KeyboardInterrupt:
        status = -passed[0]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if status < 0:  # it was killed itself, by us or by somebody else
        status = 128 + passed[0] if passed else 1
    if status == 1 and not node_rank:  # also if no rank was left to say so
        run.write_summary({**run.read_summary(), "status": "failed"})
    return status


def _start_agent(run: RunDirectory, node_rank: int) -> Any:
    """Start the agent: a fork of a process that has imported everything, or from nothing."""
    config, warm = run.load(), _warm()
    environment = rank_environment(config)
    if warm and (agent := warm.start_agent(run, node_rank, config, environment)):
        return agent
    # In a session of its own: a Ctrl-C reaches the ranks once, through us.
    words = command("agent", run, node_rank)
    return subprocess.Popen(words, env=environment, start_new_session=True)


def _warm() -> Any:
    """Return the module that forks processes, None without the extra."""
    found = is_module("warm", "server")
    return importlib.import_module("lockstep_gpt.warm.server") if found else None


def sharing_servers() -> contextlib.AbstractContextManager[None]:
    """Let runs that are started meanwhile, the jobs of a sweep, be forks of the same process."""
    warm = _warm()
    return warm.kept() if warm else contextlib.nullcontext()


def rank_environment(config: Config) -> dict[str, str]:
    """Return the environment of agent and ranks; a value that the user has set stays.

    Libraries read these when they are loaded, so they are there before any rank is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // config.trainer["devices"])
    keeps = config.launch.keep_memory and config.trainer["accelerator"] == "cpu"
    ours = {"OMP_NUM_THREADS": str(threads), **(KEEP_MEMORY if keeps else {})}
    return {**ours, **os.environ}


def main(role: str, path: str, *node_rank: str) -> NoReturn:
    """Be an agent or a rank of the run in the directory at `path`, to the end of the process."""
    end_with_parent()
    import_all([MODULES[role]])
    module = importlib.import_module(MODULES[role])
    end_process(module.main(RunDirectory(Path(path)), *map(int, node_rank)))


def import_all(modules: list[str]) -> None:
    """Import `modules` with the garbage collector off, and have it pass over them for good.

    torch and Lightning make so many lasting objects that collecting among them takes a fifth of
    the time of their import, and later some of the time of each step.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()


def end_process(status: int) -> NoReturn:
    """End this process as the interpreter would, but without taking apart what it has imported.

    That takes a second and a half, of each rank; and gloo would close its connections in order,
    which takes for ever where another machine is gone without a word.
    """
    if status != LOST_PEERS:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as always
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, broken or closed
            stream.flush()
    os._exit(status)


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process as soon as its parent is gone, so that nothing outlives a killed run.

    Args:
        parent: its id, where that is known from before this process could ask; None: asks now.
    """
    expected = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
