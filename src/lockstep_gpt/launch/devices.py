"""The devices of a run: resolves `auto` to those present, without torch."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import apple, checks, launcher, slurm
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.settings import check

DEVICE_FILES, CPU_FLAGS = Path("/dev"), Path("/proc/cpuinfo")


def place(config: Config) -> Placement:
    """Resolve `auto` to devices present; raise a `UserError` for missing or impossible ones."""
    slurm.become_rank(config)
    accelerator = accelerator_of(config.trainer.get("accelerator", "auto"))
    gpus = gpu_count() if accelerator == "cuda" else None  # CPU ranks have no limit
    devices, nodes = config.trainer.get("devices", "auto"), config.trainer.get("num_nodes", 1)
    if launcher.is_inside_launcher():
        devices, nodes = launcher.launched_sizes(devices, nodes)
    elif devices == "auto":
        devices = gpus or 1
    if gpus is not None and devices > gpus:
        raise UserError(f"trainer.devices={devices}, but {_found(gpus)}; set at most {gpus}")
    placement = Placement(accelerator, devices, nodes)
    checks.refuse_impossible(config, placement)
    return placement


def accelerator_of(wanted: str) -> str:
    """Return cpu, cuda, or mps for `wanted`, or raise a `UserError`."""
    if apple.is_chosen(wanted):
        return "mps"
    has_gpus = wanted != "cpu" and gpu_count() > 0
    rule = f"needs a GPU, but {_found(0)}; set trainer=cpu to run without one"
    check("trainer.accelerator", wanted, has_gpus or wanted in ("cpu", "auto"), rule)
    return "cuda" if has_gpus else "cpu"


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
