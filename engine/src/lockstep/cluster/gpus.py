"""The GPUs of this machine, as torch and `nvidia-smi` see them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import torch

from lockstep.cluster.report import Finding, failure, ok, warning
from lockstep.cluster.topology import Topology, parse
from lockstep.settings import counted

PATIENCE = 20.0  # timeout for nvidia-smi in seconds; it hangs if the driver is in a bad state
GIB = 2**30
BUSY = 0.02  # fraction of a device's memory that other processes may use


def ask(*arguments: str) -> str:
    """Return the output of `nvidia-smi`, or an empty string if it is missing, fails, or hangs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def table(*fields: str) -> dict[str, dict[str, str]]:
    """Return `fields` of each GPU, by UUID; `nvidia-smi --help-query-gpu` lists all fields."""
    names = ("uuid", *fields)
    out = ask(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)}


def uuid(index: int) -> str:
    """Return the UUID of torch's device `index`, as `nvidia-smi` writes it."""
    name = str(torch.cuda.get_device_properties(index).uuid)
    return name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}"


def examine_device(local_rank: int, local_world_size: int, accelerator: str) -> list[Finding]:
    """Check that this rank's device exists and is free."""
    if accelerator == "cpu":
        return [_cores(local_world_size)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    mask = ""
    if visible is not None:
        mask = f" with CUDA_VISIBLE_DEVICES={visible}"
    count = torch.cuda.device_count()
    if count <= local_rank:
        return [
            failure(
                "device",
                f"LOCAL_RANK={local_rank} but torch {torch.__version__} sees "
                f"{counted(count, 'GPU')}{mask}",
                "start fewer ranks, widen CUDA_VISIBLE_DEVICES, or install the driver that "
                "this build of torch needs",
            )
        ]
    return _occupied(local_rank) or [ok("device", _described(local_rank) + mask)]


def _cores(local_world_size: int) -> Finding:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    line = (
        f"cpu, {counted(local_world_size, 'rank')} of {counted(threads, 'thread')} on "
        f"{counted(cores, 'core')}"
    )
    if threads * local_world_size > cores:
        fix = f"export OMP_NUM_THREADS={max(1, cores // local_world_size)}"
        return warning("device", line, fix)
    return ok("device", line)


def _described(index: int) -> str:
    device = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {device.name}, {device.total_memory / GIB:.1f} GiB"


def _occupied(index: int) -> list[Finding]:
    """Check for other processes' memory; call it before this process has a context there."""
    row = table("memory.used", "memory.total").get(uuid(index))
    try:
        used = float(row["memory.used"])  # type: ignore[index]
        total = float(row["memory.total"])  # type: ignore[index]
    except (TypeError, ValueError):
        return []
    if used <= BUSY * total:
        return []
    line = f"{_described(index)}: {used:.0f} of {total:.0f} MiB are already in use"
    return [warning("device", line, "nvidia-smi shows by which processes")]


def identity(index: int) -> tuple[str, str, str] | None:
    """Return UUID, name, and driver of torch's device `index`; None if there is no such device."""
    if torch.cuda.device_count() <= index:
        return None
    number = uuid(index)
    driver = table("driver_version").get(number, {}).get("driver_version", "")
    return number, str(torch.cuda.get_device_properties(index).name), driver


def topology(devices: Sequence[int]) -> Topology | None:
    """Return the paths between torch's `devices`; None if they are unknown."""
    try:
        machine = parse(ask("topo", "-m"))
    except ValueError:
        return None
    numbers = {name: int(row["index"]) for name, row in table("index").items()}
    chosen = {numbers.get(uuid(device), -1) for device in devices}
    if not chosen <= set(machine.gpus):
        return None
    return machine.among([*chosen])
