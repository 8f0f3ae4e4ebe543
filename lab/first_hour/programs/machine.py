"""Print what all figures depend on, as one line of JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "lightning", "triton", "numpy", "hydra-core", "wandb")


def main() -> None:
    """Print the facts, and the number of GPUs."""
    facts = {
        "devices": devices(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "CUDA": f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl()}",
        "host": f"{platform.system()}, {os.cpu_count()} cores, {memory()}",
        "versions": ", ".join(f"{name} {version_of(name)}" for name in ("Python", *PACKAGES)),
        "commit": first_line("git", "-C", str(Path(__file__).parent), "describe", "--always"),
    }
    print(json.dumps({**facts, "count": torch.cuda.device_count()}))


def devices() -> str:
    """Return the number, the name, and the memory of the GPUs, or the processor."""
    count = torch.cuda.device_count()
    if not count:
        return f"no GPU ({platform.machine()})"
    properties = torch.cuda.get_device_properties(0)
    return f"{count} x {properties.name}, {properties.total_memory / 1e9:.0f} GB"


def nccl() -> str:
    """Return the version of NCCL."""
    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def memory() -> str:
    """Return the host's memory."""
    if not hasattr(os, "sysconf"):
        return "unknown memory"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB"


def version_of(name: str) -> str:
    """Return a package's version."""
    if name == "Python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def first_line(*words: str) -> str:
    """Return the first line that a program prints; "unknown" if it cannot."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


if __name__ == "__main__":
    main()
