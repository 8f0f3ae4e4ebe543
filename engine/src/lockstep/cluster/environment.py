"""Checks that a rank can make alone: its variables, host name, shared memory, and disks."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.cluster.report import Finding, failure, ok, warning
from lockstep.errors import UserError
from lockstep.file_systems import bytes_left
from lockstep.variables import GLOO, NCCL, refuse_absent_interface

GIB, MIB = 2**30, 2**20
SHARED_MEMORY = Path("/dev/shm")
ROUTES = Path("/proc/net/route")
LEAST_SHARED_MEMORY = 64 * MIB  # the default in containers, which NCCL soon fills
LEAST_DISK, GOOD_DISK = 100 * MIB, 5 * GIB
SLOW_IMPORTS = 60.0  # seconds
FOLDER_PATIENCE = 5.0  # seconds to wait until a shared file system shows a file from another node
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WHOLE_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# Variables that slow down every run: name -> (the value that does so, its effect).
SLOW = {
    "NCCL_P2P_DISABLE": ("1", "GPUs exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a node use the network"),
    "NCCL_IB_DISABLE": ("1", "nodes use TCP instead of InfiniBand"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked twice"),
}
# Variables that contain a launcher's number of tasks -> how to set the variables that torch reads.
TASKS = {
    "OMPI_COMM_WORLD_SIZE": "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
    "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK",
}


def examine_launcher(variables: Mapping[str, str]) -> list[Finding]:
    """Check the variables from the launcher; a rank whose check fails cannot meet the others."""
    missing = [name for name in REQUIRED if name not in variables]
    if missing:
        return [
            failure(
                "launcher",
                f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}",
                "start the ranks with torchrun, or export it yourself",
            )
        ]
    wrong = [name for name in WHOLE_NUMBERS if not variables.get(name, "0").isdigit()]
    if wrong:
        values = ", ".join(f"{name}={variables[name]}" for name in wrong)
        return [
            failure("launcher", f"{values} must be a whole number", f"set {' and '.join(wrong)}")
        ]
    return _numbers({name: int(variables[name]) for name in WHOLE_NUMBERS if name in variables})


def _numbers(numbers: dict[str, int]) -> list[Finding]:
    numbers.setdefault("LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"])
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[rank] >= numbers[size]:
            line = f"{rank}={numbers[rank]} is not below {size}={numbers[size]}"
            return [failure("launcher", line, f"set {size} to the number of ranks, or start fewer")]
    if not 0 < numbers["MASTER_PORT"] < 65536:
        line = f"MASTER_PORT={numbers['MASTER_PORT']} is not a port"
        return [failure("launcher", line, "choose one from 1024 to 65535")]
    return [ok("launcher", " ".join(f"{name}={value}" for name, value in numbers.items()))]


def examine_nodes(world_size: int, local_world_size: int) -> list[Finding]:
    """Check that the ranks are spread evenly over the nodes."""
    if world_size % local_world_size == 0:
        return []
    line = f"WORLD_SIZE={world_size} is not a multiple of LOCAL_WORLD_SIZE={local_world_size}"
    return [failure("launcher", line, "start the same number of ranks on each node; check both")]


def examine_tasks(variables: Mapping[str, str]) -> list[Finding]:
    """Detect that this process is one of several tasks that do not know of each other."""
    for name, export in TASKS.items():
        count = variables.get(name, "1")
        if count != "1" and "RANK" not in variables:
            return [
                failure(
                    "launcher",
                    f"{name}={count}, but RANK and WORLD_SIZE are not set: each task is alone",
                    f"export {export} MASTER_ADDR=... MASTER_PORT=..., or start torchrun",
                )
            ]
    return []


def examine_variables(variables: Mapping[str, str]) -> list[Finding]:
    """Check the variables that tune NCCL and gloo; return one finding for each bad one."""
    findings = [
        warning("variables", f"{name}={value}: {effect}", f"unset {name}")
        for name, (value, effect) in SLOW.items()
        if variables.get(name, "").upper() == value
    ]
    for name in (NCCL, GLOO):
        try:
            refuse_absent_interface(name, variables.get(name, ""))
        except UserError as error:
            fault, _, fix = str(error).partition("; ")
            findings.append(failure("variables", fault, fix))
    tuned = sorted(name for name in variables if re.match("NCCL_|GLOO_", name))
    if findings:
        return findings
    listing = " ".join(f"{name}={variables[name]}" for name in tuned)
    return [ok("variables", listing or "no NCCL or GLOO variable is set")]


def examine_names(variables: Mapping[str, str], nodes: int) -> list[Finding]:
    """Check that other nodes can reach the addresses of this host's name and the master's.

    gloo listens at the address of the host's own name; on Debian, that is often 127.0.1.1.
    """
    host = socket.gethostname()
    master = variables.get("MASTER_ADDR", "localhost")
    address = _resolve(master)
    if address is None:
        return [
            failure(
                "names",
                f"MASTER_ADDR={master} cannot be resolved",
                "give the address of the node of rank 0, or add it to /etc/hosts",
            )
        ]
    host_address = _resolve(host)
    interface = variables.get("GLOO_SOCKET_IFNAME")
    if nodes > 1 and address.startswith("127.") and not _is_alone(master):
        return [
            failure(
                "names",
                f"MASTER_ADDR={master} is {address}, only this machine, with {nodes} nodes",
                "give the address by which the other nodes reach it",
            )
        ]
    if nodes > 1 and not interface and (host_address is None or host_address.startswith("127.")):
        where = f"resolves to {host_address}" if host_address else "does not resolve"
        return [
            failure(
                "names",
                f"{host} {where}: other nodes cannot reach gloo",
                f"set GLOO_SOCKET_IFNAME={default_interface() or '...'}, or fix /etc/hosts",
            )
        ]
    return [
        ok("names", f"{host} is {host_address or 'unknown'}, MASTER_ADDR={master} is {address}")
    ]


def _is_alone(master: str) -> bool:
    """Check whether the master is the loopback on purpose, to try several nodes on one machine."""
    return master in ("localhost", "127.0.0.1")


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def default_interface() -> str:
    """Return the interface of the default route, or an empty string."""
    try:
        rows = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return ""
    return next((row[0] for row in rows if row[1] == "00000000"), "")


def examine_shared_memory() -> list[Finding]:
    """Check the free space in /dev/shm, through which NCCL exchanges data."""
    if not SHARED_MEMORY.is_dir():
        return [ok("shared memory", "no /dev/shm on this system")]
    free = shutil.disk_usage(SHARED_MEMORY).free
    line = f"{_size(free)} free in /dev/shm"
    fix = "start the container with --shm-size=8g or --ipc=host, or mount a larger tmpfs"
    if free < LEAST_SHARED_MEMORY:
        return [failure("shared memory", f"{line}: NCCL ends with a bus error", fix)]
    return [ok("shared memory", line)]


def examine_disks(config: DictConfig) -> list[Finding]:
    """Check free space and write access where runs go, and prepared data if there are any."""
    places = {"run_dir": config.get("run_dir") or "runs"}
    root = OmegaConf.select(config, "data.root")
    if root is not None:
        places["data.root"] = root
    free: list[str] = []
    findings: list[Finding] = []
    for name, place in places.items():
        folder = nearest_folder(Path(place))
        room = bytes_left(folder)
        known = "unknown room" if room is None else f"{_size(room)} free"
        line = f"{known} for {name} in {folder}"
        fix = f"free space, or set {name}"
        if not os.access(folder, os.W_OK):
            findings.append(failure("disk", f"{name}: {folder} cannot be written", f"set {name}"))
        elif room is not None and room < LEAST_DISK:
            findings.append(failure("disk", line, fix))
        elif room is not None and room < GOOD_DISK:
            findings.append(warning("disk", line, fix))
        free.append(line)
    return findings or [ok("disk", ", ".join(free))]


def nearest_folder(path: Path) -> Path:
    """Return `path` if it is a folder, else its nearest parent folder that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


@contextlib.contextmanager
def left_in(folder: Path) -> Iterator[str]:
    """Create an empty file in `folder`, yield its name, and delete it afterwards."""
    name = f".doctor-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # another check reports a folder that is not writable
        (folder / name).touch()
    try:
        yield name
    finally:
        (folder / name).unlink(missing_ok=True)


def appears(path: Path) -> bool:
    """Wait for `path` up to FOLDER_PATIENCE seconds; return whether it exists."""
    end = time.monotonic() + FOLDER_PATIENCE
    while time.monotonic() < end:
        if path.exists():
            return True
        time.sleep(0.1)
    return path.exists()


def examine_imports(seconds: float) -> Finding:
    """Check how long it took to import torch and Lightning; a network disk can be slow."""
    line = f"torch and Lightning in {seconds:.0f} s"
    if seconds < SLOW_IMPORTS:
        return ok("imports", line)
    return warning("imports", line, "put the Python environment on a local disk")


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
