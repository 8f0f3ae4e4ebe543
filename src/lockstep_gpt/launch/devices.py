"""The devices of a run: resolves `auto` to those present, without torch."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lockstep_gpt.config import Config, UserError, check
from lockstep_gpt.registry import addition, additions, asked, merged

DEVICE_FILES, CPU_FLAGS = Path("/dev"), Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Placement:
    """The ranks of a run: `devices` on each of `nodes` machines, one rank per device."""

    accelerator: str  # cpu, cuda, or mps
    devices: int
    nodes: int


def place(config: Config) -> Placement:
    """Resolve `auto` to devices present; raise a `UserError` for missing or impossible ones."""
    accelerator = accelerator_of(config.trainer.get("accelerator", "auto"))
    found = gpu_count() if accelerator == "cuda" else None  # CPU ranks have no limit
    devices, nodes = config.trainer.get("devices", "auto"), config.trainer.get("num_nodes", 1)
    if is_inside_launcher() and (as_launched := addition("LAUNCHED")):
        devices, nodes = as_launched(devices, nodes)
    elif devices == "auto":
        devices = found or 1
    if found is not None and devices > found:
        raise UserError(f"trainer.devices={devices}, but {_found(found)}; set at most {found}")
    placement = Placement(accelerator, devices, nodes)
    asked("CHECK_START", config)
    _refuse_impossible(config, placement)
    return placement


def is_inside_launcher() -> bool:
    """Return whether a launcher, such as torchrun, has already given this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def accelerator_of(wanted: str) -> str:
    """Return cpu, cuda, or an extra's accelerator for `wanted`, or raise a `UserError`."""
    if other := next(filter(None, asked("ACCELERATOR", wanted)), ""):
        return str(other)
    gpus = wanted not in ("cpu", "mps") and gpu_count() > 0
    rule = f"needs a GPU, but {_found(0)}; set trainer=cpu to run without one"
    check("trainer.accelerator", wanted, gpus or wanted in ("cpu", "auto"), rule)
    return "cuda" if gpus else "cpu"


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


def precision_here(accelerator: str) -> str:
    """Return `bf16-mixed` on GPUs and on CPUs that multiply bfloat16 natively, else `32-true`."""
    flags = CPU_FLAGS.read_text() if CPU_FLAGS.exists() else ""  # only on Linux
    native = re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags) is not None
    return "bf16-mixed" if native or (accelerator != "cpu" and gpu_count()) else "32-true"


def _found(count: int) -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    note = "" if mask is None else f" with CUDA_VISIBLE_DEVICES={mask}"
    return f"{count or 'no'} GPU{' was' if count == 1 else 's were'} found{note}"


def _refuse_impossible(config: Config, placement: Placement) -> None:
    """Raise a `UserError` for what these devices or installed extras can't do."""
    backend = config.strategy.get("process_group_backend")
    gpus, takes = placement.accelerator == "cuda", f"but this run uses {placement.accelerator}"
    rule = f"needs a GPU, {takes}; set precision=bf16-mixed or 32-true"
    check("precision", config.precision, gpus or config.precision != "16-mixed", rule)
    rule = f"needs GPUs, {takes}; set strategy.process_group_backend=gloo"
    check("strategy.process_group_backend", backend, gpus or backend != "nccl", rule)
    missing = "needs an extra that is not installed"
    # Other methods may belong to a user's strategy, which handles them itself.
    if config.strategy.get("start_method") == "spawn" and "spawn" not in merged("START_RANKS"):
        raise UserError(f"strategy.start_method=spawn {missing}; remove it")
    fits = placement.nodes == 1 or is_inside_launcher() or any(additions("START_ON_NODES"))
    rule = f"{missing}: nodes, or launchers for torchrun or srun on the machines"
    check("trainer.num_nodes", placement.nodes, fits, rule)
