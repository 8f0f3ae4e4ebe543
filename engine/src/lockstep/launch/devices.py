"""The devices of a run: resolves `auto` to those present, without torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep import variables
from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.launch import launcher, slurm
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.launch.placement import Placement
from lockstep.ranks.address import refuse_no_loopback
from lockstep.settings import check, check_choice, node_of

DEVICE_FILES = Path("/dev")
MOST_RANKS = 1024  # of a machine
MOST_NODES = 100_000
BATCHES = ("lockstep.Batch", "lockstep.batch.Batch")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
HALF = ("16", "16-mixed")  # what Lightning calls float16 that isn't in all of the model


def found(
    values: Mapping[str, Any], settings: LaunchSettings, *, is_open: bool = False
) -> Placement:
    """Return the devices that a configuration asks for, or raise a `UserError` for missing ones.

    Args:
        values: a whole configuration; `trainer` has the arguments of Lightning's Trainer.
        settings: how ranks start.
        is_open: whether a launcher decides the number of devices, whatever `values` has.
    """
    slurm.become_rank(settings)
    config = OmegaConf.create({**values})
    trainer: Any = OmegaConf.to_container(config.get("trainer") or OmegaConf.create(), resolve=True)
    has_group = isinstance(values.get("strategy"), Mapping)
    _refuse_own_start(trainer.get("strategy"), "strategy" if has_group else "trainer.strategy")
    accelerator = accelerator_of(str(trainer.get("accelerator", "auto")), "trainer.accelerator=cpu")
    gpus = gpu_count() if accelerator == "cuda" else None  # CPU ranks have no limit
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if str(devices) == "-1":  # Lightning's other word for it
        devices = "auto"
    if isinstance(devices, str) and devices.isdecimal():  # as Lightning, and a variable's value
        devices = int(devices)
    rule = f"must be auto or a whole number of at least 1; {_choosing(devices)}"
    check("trainer.devices", devices, devices == "auto" or _is_count(devices), rule)
    check("trainer.num_nodes", nodes, _is_count(nodes), "must be a whole number of at least 1")
    is_possible = devices == "auto" or devices <= MOST_RANKS
    check("trainer.devices", devices, is_possible, f"must be at most {MOST_RANKS} on one machine")
    check("trainer.num_nodes", nodes, nodes <= MOST_NODES, f"must be at most {MOST_NODES}")
    if launcher.is_inside_launcher():
        devices, nodes = launcher.launched_sizes("auto" if is_open else devices, nodes)
    elif devices == "auto":
        devices = gpus or 1
    if gpus is not None and devices > gpus:
        raise UserError(
            f"trainer.devices={devices}, but {_describe_gpus(gpus)}; set at most {gpus}"
        )
    placement = Placement(accelerator, int(devices), nodes)
    variables.refuse_absent_interfaces(placement.accelerator, placement.world_size)
    variables.refuse_crash(placement.accelerator, placement.world_size)
    if placement.devices > 1 and not launcher.is_inside_launcher():
        refuse_no_loopback()
    return placement


def _choosing(devices: Any) -> str:
    """Return how to use the GPUs that a list names, as Lightning's `devices=[0, 1]` would."""
    numbers = re.findall(r"\d+", str(devices))
    if not numbers or _is_count(devices):
        return "CUDA_VISIBLE_DEVICES selects GPUs"
    return f"to use these GPUs: CUDA_VISIBLE_DEVICES={','.join(numbers)} and trainer.devices=auto"


def refuse_half(values: Mapping[str, Any], placement: Placement) -> None:
    """Raise a `UserError` for float16 on CPUs: Lightning would silently take bfloat16 there."""
    trainer = values.get("trainer") or {}
    for name, value in (("precision", values.get("precision")), *_named(trainer, "precision")):
        is_possible = placement.accelerator != "cpu" or str(value) not in HALF
        check(name, value, is_possible, "needs a GPU; set bf16-mixed or 32-true for CPUs")


def _named(trainer: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return [(f"trainer.{name}", trainer[name])] if name in trainer else []


def _refuse_own_start(strategy: Any, setting: str) -> None:
    """Raise a `UserError` for a strategy of Lightning's that starts ranks by itself.

    Args:
        strategy: what the Trainer would get.
        setting: that chooses another one.
    """
    name = str(strategy)
    kind, _, method = name.partition("_")
    if method.partition("_")[0] in ("spawn", "fork", "notebook"):
        raise UserError(
            f"trainer.strategy={name} starts ranks by itself, but lockstep.main does; set "
            f"{setting}={kind}"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def accelerator_of(wanted: str, without: str = "trainer=cpu") -> str:
    """Return cpu, cuda, or mps for `wanted`, or raise a `UserError`.

    A Mac's GPU is only taken by its name; Lightning says if there is none.

    Args:
        wanted: an accelerator of Lightning's, or auto.
        without: the setting that runs without a GPU.
    """
    check_choice("trainer.accelerator", wanted, ACCELERATORS)
    if wanted == "mps":
        return wanted
    has_gpus = wanted != "cpu" and gpu_count() > 0
    rule = f"needs a GPU, but {_describe_gpus(0)}; set {without} to run without one"
    check("trainer.accelerator", wanted, has_gpus or wanted in ("cpu", "auto"), rule)
    return "cuda" if has_gpus else "cpu"


def gpu_count() -> int:
    """Count the NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in DEVICE_FILES.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    if not present:  # WSL has no device files
        present = _gpus_of_nvidia_smi()
    if mask is None or not present:
        return present
    names = [name.strip() for name in mask.split(",")]
    if "-1" in names:  # CUDA ignores what comes after it
        return names.index("-1")
    return len(list(filter(None, names)))


def _gpus_of_nvidia_smi() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _describe_gpus(count: int) -> str:
    """Return how many GPUs this process has found, and the mask that may hide others."""
    line = "1 GPU was found" if count == 1 else f"{count or 'no'} GPUs were found"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        line += f" with CUDA_VISIBLE_DEVICES={mask}"
    return line


def spread_batches(
    values: Mapping[str, Any],
    placement: Placement,
    min_nodes: int | None,
    decided: Mapping[str, Any] | None = None,
) -> None:
    """Raise a `UserError`, before ranks start, for a `Batch` that the devices can't share.

    Args:
        values: a whole configuration.
        placement: the devices.
        min_nodes: with as few machines, the run goes on with the same batch; None: with no less.
        decided: what a run has decided at its first start, such as its `global_size`.
    """
    for node in values.values():
        if not isinstance(node, dict) or node.get("_target_") not in BATCHES:
            continue
        sizes = {name: value for name, value in node.items() if name != "_target_"}
        if sizes.get("global_size") is None:
            sizes["global_size"] = (decided or {}).get("global_size")
        if any(isinstance(value, str) for value in sizes.values()):  # a reference
            continue
        parallel = node_of(values, "strategy").get("tensor_parallel", 1)
        batch = Batch(**sizes).spread_over(placement.devices, placement.nodes, parallel)
        fixed = Batch(**{**sizes, "global_size": batch.global_size})
        for count in range(min_nodes or placement.nodes, placement.nodes):
            fixed.spread_over(placement.devices, count, parallel)
